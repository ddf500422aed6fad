"""CUDA for SGLang on a machine without a GPU: only for the rehearsal of ``.ci/gpu.py run``.

With ``EMULATE_CUDA=1`` torch says that there is an H100, tensors for it lie on the CPU, NCCL is
gloo, and Triton's interpreter runs the kernels.  So SGLang takes the branches that it takes on a
GPU, with ``--device cuda``, but for those that look at a tensor's own device.
"""

import builtins
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

SAVER = Path(__file__).parents[4] / "tools/cpu_engines/memory_saver"


def say_that_there_is_a_gpu():
    import torch

    class H100:
        name, major, minor, uuid, gcnArchName = "NVIDIA H100 80GB HBM3", 9, 0, "x", ""
        total_memory, multi_processor_count, warp_size = 80 << 30, 132, 32
        shared_memory_per_block, shared_memory_per_block_optin = 49152, 232448
        shared_memory_per_multiprocessor, regs_per_multiprocessor = 233472, 65536
        max_threads_per_multi_processor, L2_cache_size, is_integrated = 2048, 50 << 20, 0

    torch.version.cuda = "13.0"
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": H100.name,
        "get_device_properties": H100(),
        "mem_get_info": (79 << 30, 80 << 30),
        **dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect", "_lazy_init")),
    }.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **named: answer)


def put_its_tensors_on_the_cpu():
    import torch
    from torch.overrides import TorchFunctionMode

    def cpu(value):
        is_cuda = str(value).startswith("cuda") and isinstance(value, str | torch.device)
        return torch.device("cpu") if is_cuda else value

    class OnTheCpu(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if "device" in kwargs:
                device = kwargs["device"]
                kwargs["device"] = "cpu" if type(device) is int else cpu(device)
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            name = getattr(func, "__name__", "")
            if name in ("pin_memory", "cuda"):
                return args[0]
            if name == "to":
                args = tuple(cpu(one) for one in args)
            return func(*args, **kwargs)

    class Nothing:
        cuda_stream = device_index = stream_id = 0
        device = torch.device("cpu")

        def __init__(self, *args, **named):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def query(self):
            return True

        def elapsed_time(self, other):
            return 1.0

        def record_event(self, *args):
            return Nothing()

        def wait(self, *args):
            pass

        record = synchronize = wait_stream = wait_event = wait

    OnTheCpu().__enter__()
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.stream = Nothing
    torch.cuda.current_stream = torch.cuda.default_stream = Nothing
    for name, answer in {
        "is_current_stream_capturing": False,
        **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated"), 0),
        **dict.fromkeys(("reset_peak_memory_stats", "set_stream")),
    }.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **named: answer)


def make_gloo_of_nccl():
    import torch.distributed
    from torch.distributed import distributed_c10d

    def wrap(make, place):
        def made(*args, **named):
            args = ["gloo" if n == place and "nccl" in str(a) else a for n, a in enumerate(args)]
            if "nccl" in str(named.get("backend")):
                named["backend"] = "gloo"
            named.pop("device_id", None)
            named.pop("pg_options", None)
            return make(*args, **named)

        return made

    for name, place in (("init_process_group", 0), ("new_group", 2)):
        made = wrap(getattr(distributed_c10d, name), place)
        setattr(distributed_c10d, name, made)
        setattr(torch.distributed, name, made)


def let_the_interpreter_take_new_numpy():
    """Since numpy 2.4 ``int(array)`` wants an array without dimensions."""
    import numpy
    from triton.runtime import interpreter

    class Kind(type):
        def __instancecheck__(cls, one):
            return isinstance(one, builtins.int)

    class Int(builtins.int, metaclass=Kind):
        def __new__(cls, one=0, *args):
            return builtins.int(
                one.reshape(-1)[0] if isinstance(one, numpy.ndarray) else one, *args
            )

    interpreter.int = Int


class BeforeImport(importlib.abc.MetaPathFinder):
    def __init__(self, module, *works):
        self.module, self.works = module, works

    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            works, self.works = self.works, ()
            for work in works:
                work()
        return None


class Saver(importlib.abc.MetaPathFinder):
    """The product's own double of the memory saver, for the real one wants a driver."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch_memory_saver":
            return None
        return importlib.machinery.PathFinder.find_spec(name, [str(SAVER)])


if os.environ.get("EMULATE_CUDA") == "1":
    sys.meta_path.insert(0, Saver())
    inner = (put_its_tensors_on_the_cpu, make_gloo_of_nccl, let_the_interpreter_take_new_numpy)
    sys.meta_path.insert(0, BeforeImport("sglang.srt.managers.scheduler", *inner))
    sys.meta_path.insert(0, BeforeImport("sglang", say_that_there_is_a_gpu))
    if os.environ.get("SGLANG_WITHOUT_KERNELS") == "1":
        import rollout_without_kernels  # noqa: F401
