/* lesson.h - learning without storing. A GPU keeps the rows of a cache itself and needs a tensor in
 * the computer's memory only for what the tensor learns from them. Encoding the rows would take a
 * third of that time. */
#pragma once

#include <kvant/tensor.h>

/* Learns from n rows as kvant_tensor_write does, and stores none of them. At least 64 rows. The
 * blocks of the slots get the version that the rows chose, for kvant_tensor_get_block and
 * kvant_tensor_make_codec; nothing else is to be asked of these blocks. Rows are not checked for
 * fp16's range. KVANT_ERR_ARGUMENT, KVANT_ERR_NONFINITE, KVANT_ERR_MEMORY: nothing was learned. */
kvant_status kvant_tensor_learn(kvant_tensor *tensor, const int64_t *slots, size_t n,
                                const float *rows, size_t stride, uint32_t n_threads);
