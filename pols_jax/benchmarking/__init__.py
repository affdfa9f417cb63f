"""Speed: what one logit costs against all of them, and the losses and metrics against those of other libraries.

``timing`` measures, ``records`` keeps what was measured, ``programs`` checks what the compiler made of it. ``logits_speed``,
``loss_speed`` and ``metric_speed`` are the three benchmarks of ``pols bench``, ``torch_peer`` the same work in PyTorch, and
``speed_tables`` and ``speed_figures`` turn records into tables and figures.
"""
