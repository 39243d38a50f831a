"""Take out of executed notebooks what only a running kernel can show: the state and the output of sliders.

`make notebooks` runs it; left in, readers without a kernel would see an error message in place of a slider.
"""

import sys

import nbformat

for path in sys.argv[1:]:
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if "slider" in cell.metadata.get("tags", []):
            cell.outputs = []
    nbformat.write(notebook, path)
