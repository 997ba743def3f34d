/* cuda_table.h - the interface between libkvant and libkvant_cuda.so: a table of functions on plain
 * data.
 *
 * libkvant opens the library when it first needs a GPU (cuda.c). It asks the library's only
 * exported function for the table, and refuses a table with another version or other sizes.
 * libkvant_cuda calls no function of libkvant. Raise the version when a function or the meaning of
 * a field changes; sizes guard the structs. */
#pragma once

#include <kvant/cuda_kernels.h>

#include "../codec/view.h"
#include "index.h"
#include "memory.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVANT_CUDA_TABLE_VERSION 21u /* raise it with the table */
#define KVANT_CUDA_TABLE_FUNCTION "kvant_cuda_table_get"

/* X(result, name, parameters). Each is called by kvant_cuda_<name> of kvant/cuda.h or
 * kvant/cuda_kernels.h, and the last sixteen by functions of memory.h and index.h. Five differ from
 * their public functions: codec_create takes a view instead of a spec, device_check is a part of
 * kvant_cuda_available, and append, attention and transform_queries take the structs of
 * kvant_cuda_kernel_<name>. */
#define KVANT_CUDA_TABLE_FUNCTIONS(X)                                                              \
    X(kvant_status, device_check, (char *err, size_t errlen))                                      \
    X(kvant_status, codec_create,                                                                  \
      (const kvant_codec_view *view, kvant_cuda_codec **codec, char *err, size_t errlen))          \
    X(kvant_status, codec_create_open, (const kvant_cuda_codec *sealed, kvant_cuda_codec **open))  \
    X(void, codec_free, (kvant_cuda_codec * *codec))                                               \
    X(kvant_status, codec_get_info, (const kvant_cuda_codec *codec, kvant_codec_info *info))       \
    X(kvant_status, append, (const kvant_cuda_kernel_append_args *args, kvant_cuda_stream stream)) \
    X(kvant_status, seal, (const kvant_cuda_seal_args *args, kvant_cuda_stream stream))            \
    X(kvant_status, attention_check,                                                               \
      (const kvant_cuda_codec *k_codec, const kvant_cuda_codec *v_codec, char *err,                \
       size_t errlen))                                                                             \
    X(size_t, attention_workspace, (uint32_t head_dim, uint32_t n_matrices))                       \
    X(kvant_status, attention,                                                                     \
      (const kvant_cuda_kernel_attention_args *args, kvant_cuda_stream stream))                    \
    X(kvant_status, fill_marked, (const kvant_cuda_marked_args *args, kvant_cuda_stream stream))   \
    X(void, limit_shared_memory, (size_t bytes))                                                   \
    X(size_t, block_workspace, (const kvant_cuda_block_args *args))                                \
    X(kvant_status, block_attention,                                                               \
      (const kvant_cuda_block_args *args, kvant_cuda_stream stream))                               \
    X(kvant_status, transform_queries,                                                             \
      (const kvant_cuda_kernel_query_args *args, kvant_cuda_stream stream))                        \
    X(kvant_status, compact, (const kvant_cuda_compact_args *args, kvant_cuda_stream stream))      \
    X(kvant_status, center_rows,                                                                   \
      (const kvant_cuda_center_rows_args *args, kvant_cuda_stream stream))                         \
    X(kvant_status, page_offsets,                                                                  \
      (const kvant_cuda_page_offsets_args *args, kvant_cuda_stream stream))                        \
    X(kvant_status, decode, (const kvant_cuda_decode_args *args, kvant_cuda_stream stream))        \
    X(kvant_status, exact_step, (const kvant_cuda_exact_args *args, kvant_cuda_stream stream))     \
    X(kvant_status, seal_rows, (const kvant_cuda_seal_rows_args *args, kvant_cuda_stream stream))  \
    X(kvant_status, learn, (const kvant_cuda_learn_args *args, kvant_cuda_stream stream))          \
    X(kvant_status, expand, (const kvant_cuda_expand_args *args, kvant_cuda_stream stream))        \
    X(kvant_status, place_centers,                                                                 \
      (const kvant_cuda_place_centers_args *args, kvant_cuda_stream stream))                       \
    X(kvant_status, device_current, (int *device))                                                 \
    X(kvant_status, memory_new, (void **memory, size_t bytes))                                     \
    X(void, memory_free, (void *memory))                                                           \
    X(kvant_status, host_new, (void **memory, size_t bytes))                                       \
    X(void, host_free, (void *memory))                                                             \
    X(kvant_status, memory_copy,                                                                   \
      (void *to, const void *from, size_t bytes, kvant_cuda_stream stream))                        \
    X(kvant_status, memory_read,                                                                   \
      (void *to, const void *from, size_t bytes, kvant_cuda_stream stream))                        \
    X(kvant_status, memory_clear, (void *memory, size_t bytes, kvant_cuda_stream stream))          \
    X(kvant_status, largest,                                                                       \
      (const kvant_cuda_values *numbers, float *largest, kvant_cuda_stream stream))                \
    X(kvant_status, note_rows, (const kvant_cuda_note_args *args, kvant_cuda_stream stream))       \
    X(kvant_status, rotate_rows,                                                                   \
      (const kvant_cuda_rotate_rows_args *args, kvant_cuda_stream stream))                         \
    X(kvant_status, index_create, (const kvant_cuda_index_args *args, kvant_cuda_index **index))   \
    X(void, index_free, (kvant_cuda_index * *index))                                               \
    X(kvant_status, index_put,                                                                     \
      (kvant_cuda_index * index, size_t first, size_t n, const uint8_t *codes))                    \
    X(kvant_status, index_find, (kvant_cuda_index * index, const kvant_cuda_find_args *args))

/* The sizes of all structs of arguments together. A struct that has got a member changes the sum,
 * unless the member is in padding, where its zeros mean what they meant before. */
#define KVANT_CUDA_ARGS_BYTES                                                                      \
    (uint32_t)(sizeof(kvant_cuda_kernel_append_args) + sizeof(kvant_cuda_seal_args) +              \
               sizeof(kvant_cuda_kernel_attention_args) + sizeof(kvant_cuda_marked_args) +         \
               sizeof(kvant_cuda_block_args) + sizeof(kvant_cuda_kernel_query_args) +              \
               sizeof(kvant_cuda_center_rows_args) + sizeof(kvant_cuda_page_offsets_args) +        \
               sizeof(kvant_cuda_compact_args) + sizeof(kvant_cuda_expand_args) +                  \
               sizeof(kvant_cuda_place_centers_args) + sizeof(kvant_cuda_decode_args) +            \
               sizeof(kvant_cuda_exact_args) + sizeof(kvant_cuda_seal_rows_args) +                 \
               sizeof(kvant_cuda_learn_args) + sizeof(kvant_cuda_values) +                         \
               sizeof(kvant_cuda_note_args) + sizeof(kvant_cuda_rotate_rows_args) +                \
               sizeof(kvant_cuda_index_args) + sizeof(kvant_cuda_find_args))

typedef struct kvant_cuda_table {
    uint32_t version; /* KVANT_CUDA_TABLE_VERSION */
    /* The sizes of this struct, of kvant_codec_view and of kvant_codec_info, and
     * KVANT_CUDA_ARGS_BYTES */
    uint32_t size, view_bytes, info_bytes, args_bytes;
#define KVANT_CUDA_TABLE_MEMBER(result, name, parameters) result(*name) parameters;
    KVANT_CUDA_TABLE_FUNCTIONS(KVANT_CUDA_TABLE_MEMBER)
#undef KVANT_CUDA_TABLE_MEMBER
} kvant_cuda_table;

/* The type of the only symbol that libkvant_cuda.so exports, KVANT_CUDA_TABLE_FUNCTION. It never
 * returns NULL. */
typedef const kvant_cuda_table *kvant_cuda_table_get_fn(void);

#ifdef __cplusplus
}
#endif
