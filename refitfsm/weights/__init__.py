"""New weights: what they consist of, where they come from, and the payloads that carry them.

Nothing here imports SGLang, and nothing imports torch before a torch tensor on a GPU is sent.

- `manifest`: names, dtypes and shapes of a set of weights, and how two sets differ.
- `safetensors`: a checkpoint folder, checked and mapped. `files` writes one.
- `plan`: pushes of a bounded size.
- `source`: the seam to the driver, and weights from a checkpoint. `torch_source`: weights from tensors.
- `payload`, `cuda`: the entries of `serialized_named_tensors`, with the bytes or with GPU handles.
"""
