/* saved.h - saved states of caches in GPU memory: records of rows (saved.c), and records that come
 * back (restored.c). The lock is held unless a comment says otherwise. */
#pragma once

#include <kvant/tensor_hooks.h>

#include "gpu.h"

/* One block with the tensor's codecs, without pages. NULL without memory. */
kvant_tensor *kvp_gpu_form(kvp_gpu_cells *cells);

/* `kvp_gpu_transform_of` returns the transform that serves blocks with an id of a position bucket,
 * as records hold it. It is in `room`, which has room for a transform, or kept by the cells. NULL:
 * it is not known. */
const void *kvp_gpu_transform_of(kvp_gpu_cells *cells, uint32_t id, void *room);

/* Functions of kvp_remote (kv_tensor.h), which take the lock themselves. */
const kvant_codec *const *kvp_gpu_codecs_of(const kvp_kv *kv);
kvp_block_state kvp_gpu_block_state(const kvp_kv *kv, uint32_t block);
kvant_status kvp_gpu_record_size(const kvp_kv *kv, const kvant_block_slots *blocks, uint32_t n,
                                 size_t *bytes);
kvant_status kvp_gpu_export_record(const kvp_kv *kv, const kvant_block_slots *blocks, uint32_t n,
                                   void *data, size_t bytes);
