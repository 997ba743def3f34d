/* buffer.h - the buffer type of the KVANT device: memory for cache tensors at their compressed
 * size. All other tensors that ggml wants here (outputs of attention, recurrent state, keys without
 * values, copies of a checkpoint) get the CPU's own memory.
 *
 * Memory is mapped and stays untouched until it is used, so the reservation of a cache costs
 * nothing. kvp_buffer_kv_memory measures resident memory, and counts learnt matrices and what
 * learning works with.
 */
#ifndef KVP_BUFFER_H
#define KVP_BUFFER_H

#include <stdbool.h>
#include <stddef.h>

#include "abi.h"
#include "kv_tensor.h"

/* Fills the buffer type's table for back-end API 2 or 3 and ties it to the device. Once, before
 * anything else. */
void kvp_buft_setup(int api, abi_device *device);

/* The buffer type; the same pointer for the life of the process. */
abi_buft *kvp_buft(void);

/* Buffer types of other devices whose cache tensors are the plug-in's (gpu/): what is said of KVANT
 * below holds for them too. At most 64, before anything else. */
void kvp_buft_add(abi_buft *buft);

/* Whether a buffer type is the device's or one of these. */
bool kvp_is_ours(const abi_buft *buft);

/* A buffer of such a type for cache tensors, in the memory of another buffer, which it frees; NULL,
 * after freeing it, when there is no memory. */
abi_buffer *kvp_buffer_around(abi_buft *buft, const kvp_remote *remote, abi_buffer *inner);

/* Bytes to allocate for a cache tensor, or a size that kvp_buffer_refused says no to, with the
 * reason. It says no to any memory of a context that kvp_kv_refused. */
size_t kvp_buffer_bytes(const abi_tensor *tensor, bool in_order);
bool kvp_buffer_refused(size_t size);

/* The tensor that owns the memory: the one itself or what it is a view of. */
const abi_tensor *kvp_root(const abi_tensor *tensor);

/* True when the tensor is (a view of) a cache tensor that lives in a KVANT buffer, allocated or
 * about to be. */
bool kvp_is_kv(const abi_tensor *tensor);

/* The cells behind such a tensor; NULL for other tensors and while llama.cpp only estimates
 * sizes. */
kvp_kv *kvp_kv_of(const abi_tensor *tensor);

/* Bytes of cache memory resident right now, over all live buffers, by mincore; *reserved: bytes
 * mapped. */
size_t kvp_buffer_kv_memory(size_t *reserved);

/* Tells what all of them take when all cells are written (kv_size.h): kvant_kv_size. */
bool kvp_buffer_kv_size(bool on_gpu, kvp_kv_size *size);
/* The same when each sequence has `tokens` tokens (kv_fill.h): kvant_kv_size_at. */
bool kvp_buffer_kv_size_at(bool on_gpu, double tokens, kvp_kv_size *size, double *in_place);

#endif /* KVP_BUFFER_H */
