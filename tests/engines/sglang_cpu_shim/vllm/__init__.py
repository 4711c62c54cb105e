"""Test only: stands in for the one vLLM kernel that SGLang's generic path borrows."""

__version__ = "0"
