"""Attention over pages of the KV cache on the GPU; `paged.py` chooses the kernel.

tokens of a run     pages                               architecture  kernel
above 8, the first  of the query's type, no window,     all           append.py, then torch's fused
of their sequence   softcap or sinks                                  kernel on keys as they came
up to 8             of the query's type                 all           flash_decode.py, which appends
all                 all in rows                         all           append.py, then
                                                                      flash_decode.py
any                 latents of 576 numbers, of the      Hopper        mla_decode.py
                    query's 16-bit type or FP8
1 of each run       the same, and `kv_b_proj` in        Hopper        mla_fused.py around
                    4-bit panels                                      mla_decode.py, by mla_layer.py
any                 in words, or queries of f64         all           `reference`

index_selection.py scores positions for an indexer, and selects the best.
combine.py merges the parts into which programs divide a context (launched by combine_launch.py);
combine_host_part.py merges what the CPU attended to.  metadata.py holds block tables and lengths of
a step on the device, tuning.py the launch sizes by shape; kv_tiles.py and kv_addressing.py are
parts of the kernels.
"""
