"""`python -m littlelm_core` is the `littlelm` command (torchrun needs a module)."""

from littlelm_core.cli import main

if __name__ == "__main__":
    main()
