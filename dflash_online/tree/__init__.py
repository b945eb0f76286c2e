"""Draft trees: what one verify step checks. Root only, a chain, or branches: one form, one code path.

draft_tree   the record and its shapes: chain, root only; visibility, links
build        the best tree of a block's logits, exact, batched; reference: its oracle, a heap
walk         greedy or sampled target tokens -> accepted path and bonus token
policy       which tree a server grows; may change while serving
"""
