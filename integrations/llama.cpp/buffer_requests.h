/* buffer_requests.h - what the next buffer of this thread will hold.
 *
 * ggml asks a buffer type for the size of every tensor of a buffer. Then it allocates the buffer,
 * without saying for which tensors. This file remembers the tensors that were asked for, and tells
 * caches of keys and values from everything else. It allocates nothing.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "abi.h"

typedef enum kvp_buffer_kind {
    KVP_BUFFER_OTHER, /* results of a graph, recurrent state, the copies of a checkpoint */
    KVP_BUFFER_KEYS,  /* keys without values: MLA's latents, an indexer's keys */
    KVP_BUFFER_CACHE, /* keys and values, which are compressed */
} kvp_buffer_kind;

/* Notes that the size of a tensor was asked for; true when the tensor belongs to a cache. plain:
 * the bytes that the tensor takes uncompressed, padding included. */
bool kvp_requests_note(const abi_tensor *tensor, size_t plain);

/* Whether the tensor that was noted last is the first of its cache with keys, or with values.
 * Shared pages are counted with that tensor (kv_steps.h). llama.cpp asks for layers in their order,
 * so a lower layer begins the next cache. Returns false while ggml places a buffer's tensors,
 * because a size that is added then has no room in the buffer. */
bool kvp_requests_begin_cache(void);

/* `kvp_requests_note_latents` notes the bytes that a tensor of keys takes as latents (mla.h),
 * before kvp_requests_note. `kvp_requests_latents` returns their sum when the buffer that is being
 * allocated holds latents only, else 0. From then on kvp_requests_place_latents is true until
 * kvp_requests_placed was called for each of these tensors, because ggml asks for the size once
 * more before it places a tensor. */
void kvp_requests_note_latents(size_t bytes);
size_t kvp_requests_latents(void);
bool kvp_requests_place_latents(void);
void kvp_requests_placed(void);

/* Adds up the bytes that the tensors of the next buffer take as a compressed cache. */
void kvp_requests_note_cache(size_t bytes);
size_t kvp_requests_cache(void);

/* Returns what the buffer that is being allocated is for, and begins the record again. *plain: the
 * bytes that its tensors take uncompressed. */
kvp_buffer_kind kvp_requests_finish(size_t *plain);

/* Begins the record again, at the start and at the end of each llama.cpp context. When llama.cpp
 * plans (--fit), it asks for sizes of caches that it never allocates. */
void kvp_requests_reset(void);
