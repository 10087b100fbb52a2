"""``k3-parity verify``: a converted folder against its source, tensor by tensor, without a model (K3.md §8, §15).

Nothing here comes from the converter's own arithmetic or tables: ``declared`` says a second time what a tier is,
``decode`` how its bytes are read. What the converter and this package both got wrong would have to be misread twice.
"""
