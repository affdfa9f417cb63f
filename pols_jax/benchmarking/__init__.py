"""Speed: what one logit costs against all of them, and the losses and metrics against those of other libraries.

``timing`` measures, ``records`` keeps what was measured, ``programs`` checks what the compiler made of it. ``logits_speed``,
``loss_speed``, ``metric_speed`` and ``network_speed`` are the benchmarks of ``pols bench``, ``torch_peer`` the same work in
PyTorch, and ``speed_tables`` and ``speed_figures`` turn records into tables and figures.
"""
