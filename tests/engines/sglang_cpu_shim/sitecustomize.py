"""Test only, for SGLang 0.5.23 without a GPU: put this directory on PYTHONPATH.

SGLang imports torchvision for its multimodal processors at start; the builds on PyPI need CUDA.
Text models never call it, so any torchvision module is answered by an empty one here.
"""

import importlib.machinery
import sys
import types


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
