"""The SGLang 0.5.23 plugin: capture, drafter swap, verify worker, acceptance counters.

    plugin.activate()  in every SGLang process: hooks, routes, algorithm, and on CPU the stand-ins
    launch             starts SGLang with the plugin and fails when it is not active everywhere

Read in this order: compat (what is touched upstream, and why), plugin, worker, capture, swap, routes.
"""
