"""TreeWY in vLLM: GDN hybrids speculate with one recurrent state per request.

vLLM finds the plugin through its entry point `vllm.general_plugins`. It does nothing until a server is started with
`--additional-config '{"treewy": {…}}'`, see `treewy.vllm.options`. A step then runs as follows.

    metadata.py      which rows of the batch are windows, as a plan for `treewy.ops` (one a step and KV-cache group)
    layer.py         windows go through `treewy.ops.verify`, prompts through vLLM's own kernels
    model_state.py   after sampling, the accepted rows are committed, and a full block becomes a prefix-cache entry
    running.py       what running requests need besides their block: window and pending rows

`hooks.py` lists what of vLLM is replaced. Nothing here is imported before vLLM is.
"""
