"""Compile every kernel for GPUs that are not here: registers, local and shared memory.

    python bench/compile_kernels.py              # sm_80 and sm_90; bfloat16; 1 and 32 requests

The functions of kernels.py run at the published size on empty tensors while their launches are
caught; each launch is compiled as the GPU would compile it. A kernel that spills registers to
local memory or asks for more shared memory than the GPU has is an error (exit status 1).
"""

import argparse
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import kernels  # noqa: E402
from dspine import DSpine, DSpineConfig, Proposal  # noqa: E402

SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes a program may use
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float16: "*fp16",
         torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8"}


class Caught:
    """Stands in for a kernel: notes what it would be compiled for, and launches nothing."""

    def __init__(self, kernel, launches: list):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, num_warps: int, num_stages: int = 3, **constants):
            signature, constexprs, attributes = {}, dict(constants), {}
            for i, (name, value) in enumerate(zip(self.kernel.arg_names, args)):
                if isinstance(value, torch.Tensor):
                    signature[name] = TYPES[value.dtype]
                elif isinstance(value, float):
                    signature[name] = "fp32"
                elif value == 1:  # as Triton's launcher does
                    signature[name], constexprs[name] = "constexpr", 1
                else:
                    signature[name] = "i32"
                if isinstance(value, torch.Tensor) or value % 16 == 0:
                    attributes[i,] = [["tt.divisibility", 16]]
            signature |= dict.fromkeys(constants, "constexpr")
            self.launches.append((grid, signature, constexprs, attributes,
                                  dict(num_warps=num_warps, num_stages=num_stages)))
        return launch


def launches(requests: int, dtype) -> list:
    """[(kernel, its launch)] of every function at the published size."""
    N, H, r, m, K, B, V = requests, 4096, 1024, 512, 16, 16, 151936
    config = DSpineConfig(
        vocab_size=V, hidden_size=H, num_target_layers=36, target_layer_ids=[1], mask_token_id=0,
        num_hidden_layers=1, intermediate_size=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, block_size=B, transfer_rank=r, message_size=m, top_k=K)
    with torch.device("meta"):
        draft = DSpine(config)
    draft = draft.to(dtype).to_empty(device="cpu").requires_grad_(False)
    empty = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype)
    names = [name for name in vars(kernels) if name.endswith("_kernel")]
    kept, found = {name: getattr(kernels, name) for name in names}, {name: [] for name in names}
    try:
        for name in names:
            setattr(kernels, name, Caught(kept[name], found[name]))
        h, code = empty(N, 1, B, H), empty(N, 1, r)
        kernels.adjacent_injection(draft.injection, 0, h, code)
        kernels.adjacent_injection(draft.injection, 0, h, code, empty(N, 1, B - 1, r),
                                   empty(N, 1, 1, 1, dtype=torch.bool))  # as in training
        ids = torch.zeros(N, B - 1, K, dtype=torch.long)
        cache = kernels.transition_cache(draft, h[:, 0, 1:], ids, ids[:, 0, 0], empty(V, H))
        if N == 1:
            wide = lambda *shape: empty(*shape, dtype=torch.float32)
            kernels.select_path(cache, ids)
            kernels.select_path(cache, ids, temperature=1.0)
            kernels.verify_greedy(wide(B, V), ids[0, :, 0])
            proposal = Proposal(ids[0, :, 0], ids[0], wide(B - 1, K))
            kernels.verify_sampled(wide(B, V), proposal, wide(B))
    finally:
        for name in names:
            setattr(kernels, name, kept[name])
    return [(kept[name], launch) for name in names
            for i, launch in enumerate(found[name]) if launch not in found[name][:i]]


def compile_for(capability: int, kernel, launch) -> dict[str, int]:
    """Resources of one program: REG, STACK, LOCAL (bytes a thread), SHARED (bytes)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    grid, signature, constexprs, attributes, options = launch
    source = ASTSource(kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        out = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True,
                             check=True).stdout
    usage = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", out)}
    return usage | {"SHARED": compiled.metadata.shared}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--capabilities", nargs="+", type=int, choices=SHARED, default=list(SHARED),
                   help="80: A100, 90: H100 and H200 (default: both)")
    p.add_argument("--requests", nargs="+", type=int, default=[1, 32], help="(default 1 and 32)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16",
                   help="(default bfloat16)")
    args = p.parse_args()
    if kernels.triton is None or kernels.INTERPRET:
        print("compile_kernels.py: needs Triton, and TRITON_INTERPRET unset", file=sys.stderr)
        return 1
    warnings.filterwarnings("ignore", message=".*TRITON_DEFAULT_FP_FUSION")
    bad = 0
    for requests in args.requests:
        for kernel, launch in launches(requests, getattr(torch, args.dtype)):
            for capability in args.capabilities:
                use = compile_for(capability, kernel, launch)
                fine = use["STACK"] == use["LOCAL"] == 0 and use["SHARED"] <= SHARED[capability]
                bad += not fine
                print(f"{kernel.fn.__name__:15} sm_{capability} {requests:3} requests, grid "
                      f"{'x'.join(map(str, launch[0])):9} {use['REG']:4} registers "
                      f"{use['STACK'] + use['LOCAL']:4} B spilled {use['SHARED']:7} B shared "
                      f"{'' if fine else ' NOT FINE'}", flush=True)
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
