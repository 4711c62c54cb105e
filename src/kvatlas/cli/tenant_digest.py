"""``kvatlas tenant digest``: a prompt as an entry of a policy of public prefixes."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from kvatlas.cli.directory import add_prompt_options, prompt_body
from kvatlas.config import load
from kvatlas.core.tenancy import prefix_digest
from kvatlas.errors import ConfigError
from kvatlas.service.tokens import Prompt, Tokenizer
from kvatlas.service.verify import CHAT, COMPLETION

_EPILOG = """\
  kvatlas tenant digest --prompt manual.txt --first 4096 --name manual >> public.toml
  kvatlas tenant digest --tokens ids.txt --name manual

Texts are made into tokens by the model's own files (tokenizer.path). The last token of a text is
often another one where the text goes on: --first takes fewer.
"""


def add_parser(what: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "a prompt's tokens as an entry of the policy that tenants.public names"
    parser = what.add_parser(
        "digest",
        help=text,
        description=text,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, default=Path("kvatlas.toml"), metavar="FILE")
    add_prompt_options(parser)
    parser.add_argument("--name", default="prompt", help="of the entry (%(default)s)")
    parser.add_argument("--first", type=int, metavar="N", help="tokens (all)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for a prompt that cannot be made into tokens."""
    body = prompt_body(args)
    if not body:
        raise ConfigError("say which prompt: --prompt, --tokens or --body")
    prompt = asyncio.run(_tokens(args.config, body))
    count = len(prompt.tokens) // 4
    first = count if args.first is None else args.first
    if not 0 < first <= count:
        raise ConfigError(f"--first {first}: the prompt has {count} tokens, and 0 would be all")
    digest = prefix_digest(prompt.tokens[: 4 * first]).hex()
    print(f'[[public]]\nname = "{args.name}"\ntokens = {first}\ndigest = "{digest}"')
    return 0


async def _tokens(path: Path, body: dict[str, Any]) -> Prompt:
    given = isinstance(body.get("prompt"), list)
    settings = None if given else load(path).tokenizer
    if settings is not None and not settings.path:
        raise ConfigError(f"{path}: a text needs tokenizer.path, or give --tokens")
    tokenizer = Tokenizer(None, None) if settings is None else Tokenizer.load(settings)
    try:
        prompt = await tokenizer.prompt(CHAT if "messages" in body else COMPLETION, body)
    finally:
        await tokenizer.close()
    if prompt.reason or not prompt.tokens:
        why = prompt.reason or "it is empty"
        raise ConfigError(f"the prompt cannot be made into tokens: {why}")
    return prompt
