"""Where torch lives: the model, its KV cache, and the execution of one planned step.

Start reading at `runner.ModelRunner.run`.
"""
