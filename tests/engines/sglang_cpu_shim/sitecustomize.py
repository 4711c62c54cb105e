"""Test only, for SGLang 0.5.23 without a GPU: put this directory on PYTHONPATH.

SGLang imports torchvision for its multimodal processors at start; the builds on PyPI need CUDA.
Text models never call it, so any torchvision module is answered by an empty one here.

HiCache copies between device and host with kernels of CUDA, and registers host memory with its
driver. On "device cpu" both sides are plain memory: torch copies, and nothing is registered.

The first half of a pair lists what it sends in pinned memory, beside an event of CUDA, where the
sender says that it takes such lists. Here it does not say so, and gets a plain one.
"""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable


class _Name(type):
    """Attributes of a placeholder are texts: enough for enumerations used as default values."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Placeholder(types.ModuleType):
    __version__ = "0"
    __path__ = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, _Finder, is_package=True)

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Placeholder(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Finder)


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Layer by layer, rows to rows."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def transfer_kv_per_layer_direct_pf_lf(  # noqa: PLR0917
    src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size
):
    """One layer of host pages [page, layer, slot, …] to rows of the device."""
    rows = src_indices.long()
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        found = source[rows // page_size, layer_id, rows % page_size]
        target[dst_indices.long()] = found.view(-1, *target.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """All layers of rows of the device to host pages."""
    rows, layers = dst_indices.long(), len(src_ptrs) // len(dst_ptrs)
    for kind, target in enumerate(dst_ptrs):
        for layer in range(layers):
            found = src_ptrs[kind * layers + layer][src_indices.long()]
            target[rows // page_size, layer, rows % page_size] = found.view(-1, *target.shape[3:])


_COPIES = (
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_all_layer_direct_lf_pf,
)


def _patch(module: types.ModuleType) -> None:
    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        if hasattr(module, name):
            setattr(module, name, lambda *args, **more: None)
    for copy in _COPIES:
        if not hasattr(module, copy.__name__):
            setattr(module, copy.__name__, copy)


def _plain_lists(module: types.ModuleType) -> None:
    module.MooncakeKVSender.supports_host_tensor_indices = False


def _patch_of(name: str) -> Callable[[types.ModuleType], None] | None:
    if name == "sglang.srt.disaggregation.mooncake.conn":
        return _plain_lists
    pools = name.startswith("sglang.srt.mem_cache.pool_host.")
    return _patch if pools or name == "sglang.srt.mem_cache.memory_pool_host" else None


_busy: set[str] = set()


class _Patches:
    """Patches modules once they are loaded."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        patch = _patch_of(name)
        if name in _busy or patch is None:
            return None
        _busy.add(name)
        spec = importlib.util.find_spec(name)
        _busy.discard(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                load(module)
                patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Patches)
