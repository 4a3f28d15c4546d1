"""`python -m splash_trt` is the command `splash-trt`."""

from splash_trt.cli import main

main()
