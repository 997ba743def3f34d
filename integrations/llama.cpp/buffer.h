/* buffer.h - the buffer type of the KVANT device: memory for cache tensors at their compressed
 * size. All other tensors that ggml wants here (outputs of attention, recurrent state, keys without
 * values, copies of a checkpoint) get the CPU's own memory.
 *
 * Memory is mapped and stays untouched until it is used, so the reservation of a cache costs
 * nothing. `kvp_buffer_kv_memory` measures resident memory, and adds learned matrices and the
 * working memory of learning.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "abi.h"
#include "kv_tensor.h"

/* Fills the buffer type's table for back-end API 2 or 3 and ties it to the device. Once, before
 * anything else. */
void kvp_buft_setup(int api, abi_device *device);

/* The buffer type; the same pointer for the life of the process. */
abi_buft *kvp_buft(void);

/* Adds the buffer type of another device (gpu/) whose cache tensors belong to the plug-in. The
 * functions below treat it like the type of the device KVANT. At most 64 types, before anything
 * else. */
void kvp_buft_add(abi_buft *buft);

/* Whether a buffer type is the device's or was added by kvp_buft_add. */
bool kvp_is_ours(const abi_buft *buft);

/* Ask the buffer type of another device: how many bytes a tensor takes; a number of bytes, padded
 * to its alignment; a new buffer, or NULL. */
size_t kvp_buft_tensor_bytes(abi_buft *buft, const abi_tensor *tensor);
size_t kvp_buft_padded(abi_buft *buft, size_t bytes);
abi_buffer *kvp_buft_new_buffer(abi_buft *buft, size_t bytes);

/* Makes a copy of such a type that has these two functions, and adds it. */
void kvp_buft_derive(abi_any_buft *to, const abi_buft *from,
                     abi_buffer *(*alloc_buffer)(abi_buft *, size_t),
                     size_t (*get_alloc_size)(abi_buft *, const abi_tensor *));

/* Makes a buffer of such a type for cache tensors, in the memory of `inner`, which it frees with
 * itself. Without memory it frees inner and returns NULL. */
abi_buffer *kvp_buffer_around(abi_buft *buft, const kvp_remote *remote, abi_buffer *inner);

/* Makes a further label of the same memory, for the caches of another device, and adds it. */
void kvp_buft_label(abi_any_buft *label);

/* Notes that ggml asked for a tensor's size. Returns the bytes that a compressed cache tensor takes
 * in the computer's memory, and 0 for all other tensors. plain: as for kvp_requests_note. */
size_t kvp_buffer_request(const abi_tensor *tensor, size_t plain);

/* Makes a buffer for the noted tensors if they are a compressed cache. `of` is its label, and it
 * has `cache` bytes. For other tensors it returns NULL, and the caller has to allocate *plain
 * bytes; `other` are the bytes that ggml asked for. NULL with 0 bytes is a failure, after a
 * message. */
abi_buffer *kvp_buffer_alloc(abi_buft *of, size_t cache, size_t other, size_t *plain);

/* Bytes to allocate for a cache tensor. When the tensor cannot be served, it is a size for which
 * kvp_buffer_refused returns true after printing the reason. `kvp_buffer_refused` also returns true
 * for any size in a context that kvp_kv_refused. */
size_t kvp_buffer_bytes(const abi_tensor *tensor, bool in_order);
bool kvp_buffer_refused(size_t size);

/* The tensor that owns the memory: the tensor itself, or the tensor that it is a view of. */
static inline const abi_tensor *kvp_root(const abi_tensor *tensor)
{
    return tensor->view_src != NULL ? tensor->view_src : tensor;
}

/* True when the tensor is (a view of) a cache tensor that lives in a KVANT buffer, allocated or
 * about to be. */
bool kvp_is_kv(const abi_tensor *tensor);

/* The tensor that is (a view of) such a cache tensor: the node or one of its sources. NULL: the
 * node touches no cache. */
const abi_tensor *kvp_cache_tensor_of(const abi_tensor *node);

/* The cells behind such a tensor; NULL for other tensors and while llama.cpp only estimates
 * sizes. */
kvp_kv *kvp_kv_of(const abi_tensor *tensor);

/* Bytes of cache memory that are resident now, over all live buffers, by mincore. *reserved: bytes
 * that are mapped. */
size_t kvp_buffer_kv_memory(size_t *reserved);

/* The plug-in's kvant_kv_size: the size of all caches when all of their cells are written
 * (kv_size.h). */
bool kvp_buffer_kv_size(bool on_gpu, kvp_kv_size *size);
/* The plug-in's kvant_kv_size_at: the same when each sequence has `tokens` tokens (kv_fill.h). */
bool kvp_buffer_kv_size_at(bool on_gpu, double tokens, kvp_kv_size *size, double *in_place);
