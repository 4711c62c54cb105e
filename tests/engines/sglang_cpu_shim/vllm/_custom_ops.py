"""Rotary position embedding in plain torch, in place, as vLLM's kernel of that name does it."""

import torch


def rotary_embedding(  # noqa: PLR0917
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    rows = cos_sin_cache[positions.flatten()].float()[:, None, :]
    half = rows.shape[-1] // 2
    cos, sin = rows[..., :half], rows[..., half:]
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(rows.shape[0], -1, head_size)
        if is_neox:
            first, second = slice(0, half), slice(half, 2 * half)
        else:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        x, y = heads[..., first].float(), heads[..., second].float()
        heads[..., first] = (x * cos - y * sin).to(tensor.dtype)
        heads[..., second] = (y * cos + x * sin).to(tensor.dtype)
