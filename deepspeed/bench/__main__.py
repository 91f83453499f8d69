"""`python -m deepspeed.bench`, as launchers start it on every rank."""

from deepspeed.bench.command import main

main()
