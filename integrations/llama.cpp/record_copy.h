/* record_copy.h - a tensor in the computer's memory that holds the blocks of a record alone. State
 * files decode from it, and a GPU's cache gets its pages from it. */
#pragma once

#include <kvant/tensor.h>

typedef struct kvp_record_copy {
    kvant_tensor *tensor;
    void *memory;
} kvp_record_copy;

/* Creates it empty, with a codec per kv head. Free it also after an error. KVANT_ERR_MEMORY, and
 * errors of kvant_tensor_create. */
kvant_status kvp_record_copy_create(const kvant_codec *const *codecs, uint32_t n_kv_heads,
                                    uint32_t n_blocks, kvp_record_copy *copy);
void kvp_record_copy_free(kvp_record_copy *copy);
