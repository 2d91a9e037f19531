"""Run a package in a process that has neither jfi nor TorchRec, and print the bytes of a GPU that a call took at most.

A script, since the test's process has both.
"""

import sys


def main(package: str, batches: str) -> None:
    for absent in ("jfi", "torchrec", "fbgemm_gpu", "triton"):
        sys.modules[absent] = None

    import torch
    from torch._inductor import aoti_load_package

    model = aoti_load_package(package)
    peak = 0
    for *args, wanted in torch.load(batches):
        if wanted.is_cuda:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        found = model(*args)
        if wanted.is_cuda:
            peak = max(peak, torch.cuda.max_memory_allocated() - before)
        error = 2e-2 if wanted.dtype == torch.bfloat16 else 1e-4 if wanted.is_cuda else 1e-5
        torch.testing.assert_close(found, wanted, atol=error, rtol=error)
    print(peak)
    print(sorted(name for name in sys.modules if name.split(".")[0] in ("jfi", "torchrec") and sys.modules[name]))


if __name__ == "__main__":
    main(*sys.argv[1:])
