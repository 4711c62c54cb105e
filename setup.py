"""The one part of the build that pyproject.toml cannot say yet: what is compiled."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"kvatlas.core.{name}",
            [f"src/kvatlas/core/{name}.cpp"],
            extra_compile_args=["-std=c++17", "-O2", "-fno-exceptions", "-fno-rtti"],
        )
        for name in ("hashing", "tables")
    ]
)
