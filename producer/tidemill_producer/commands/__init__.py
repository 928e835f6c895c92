"""The producer's part of the `tidemill` command, one noun a file.

Data goes to standard output, everything else to standard error. Errors of the queue are raised, and
become one line and an exit status in `tidemill.__main__`.
"""
