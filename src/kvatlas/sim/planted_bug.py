"""A planted bug: a piece of a production function's source, and what a programmer got wrong there.

Compiling the changed source keeps a bug as small as real ones are (a word, a line), where a
wrapper around the function could only change what goes in or comes out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.sim.canaries import patched

_HEAD = "from __future__ import annotations\n"


class Bug(msgspec.Struct, frozen=True):
    """In the source of ``symbol`` ("module:Class.method", of kvatlas) ``old`` becomes ``new``.

    ``kind`` is the class of `checkers.CLASSES` that its author expects to find it, ``what`` says
    what is wrong, in one line.
    """

    name: str
    kind: str
    symbol: str
    what: str
    old: str
    new: str

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Plant it meanwhile. Raises ConfigError where the source has no such piece any more."""
        owner, name = self.place()
        with patched(owner, name, self.changed()):
            yield

    def place(self) -> tuple[object, str]:
        """What holds the function, and under which name. Raises ConfigError where nothing does."""
        module, _, path = self.symbol.partition(":")
        *outer, name = path.split(".")
        try:
            owner: object = importlib.import_module(f"kvatlas.{module}")
            owner = functools.reduce(getattr, outer, owner)
            getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"planted bug {self.name!r}: there is no {self.symbol}") from error
        return owner, name

    def source(self) -> str:
        """The function as it stands in the product."""
        owner, name = self.place()
        return textwrap.dedent(inspect.getsource(getattr(owner, name)))

    def changed(self) -> Any:
        """The function with the bug in it."""
        owner, name = self.place()
        function = getattr(owner, name)
        source = self.source()
        if source.count(self.old) != 1:
            raise ConfigError(
                f"planted bug {self.name!r}: {self.symbol} has {self.old!r}"
                f" {source.count(self.old)} times, not once: adapt the bug to the code"
            )
        made: dict[str, Any] = {}
        source = _HEAD + source.replace(self.old, self.new)
        code = compile(source, f"<planted {self.name}>", "exec", dont_inherit=True)
        exec(code, function.__globals__, made)
        return made[name]
