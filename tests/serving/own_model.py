"""Run a package in a process that has neither jfi nor TorchRec: a script, since the test's process has both."""

import sys


def main(package: str, batches: str) -> None:
    for absent in ("jfi", "torchrec", "fbgemm_gpu", "triton"):
        sys.modules[absent] = None

    import torch
    from torch._inductor import aoti_load_package

    model = aoti_load_package(package)
    for *args, wanted in torch.load(batches):
        torch.testing.assert_close(model(*args), wanted, atol=1e-5, rtol=1e-5)
    print(sorted(name for name in sys.modules if name.split(".")[0] in ("jfi", "torchrec") and sys.modules[name]))


if __name__ == "__main__":
    main(*sys.argv[1:])
