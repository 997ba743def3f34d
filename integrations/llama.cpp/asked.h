/* asked.h - what the next buffer of this thread will hold.
 *
 * ggml asks a buffer type for the size of every tensor of a buffer and allocates the buffer next,
 * without saying which tensors it is for. This file remembers the tensors that were asked for, and
 * tells caches of keys and values from everything else. It allocates nothing.
 */
#ifndef KVP_ASKED_H
#define KVP_ASKED_H

#include <stdbool.h>
#include <stddef.h>

#include "abi.h"

typedef enum kvp_asked {
    KVP_ASKED_OTHER, /* a graph's results, recurrent state, the copies of a checkpoint */
    KVP_ASKED_KEYS,  /* keys without values: MLA's latents, an indexer's keys */
    KVP_ASKED_CACHE, /* keys and values, which are compressed */
} kvp_asked;

/* Notes that the size of a tensor was asked for; true when the tensor belongs to a cache. plain:
 * the bytes that the tensor takes uncompressed, padding included. */
bool kvp_asked_note(const abi_tensor *tensor, size_t plain);

/* Whether the tensor that was noted last is the first one of its cache with keys, or with values:
 * shared pages are counted with it (kv_steps.h). llama.cpp asks for layers in their order, and the
 * next cache begins with a lower layer. False while a buffer's tensors are placed, because what is
 * counted here has no place in the buffer. */
bool kvp_asked_begins(void);

/* Notes the bytes that a tensor of keys takes as latents (mla.h), before kvp_asked_note. Latents:
 * their sum where the buffer that is allocated now holds latents alone, else 0. From then on
 * kvp_asked_places_latents is true until kvp_asked_placed was called for each tensor of them: ggml
 * asks for the size once more before it places a tensor. */
void kvp_asked_note_latents(size_t bytes);
size_t kvp_asked_latents(void);
bool kvp_asked_places_latents(void);
void kvp_asked_placed(void);

/* Tells what the buffer is for that is allocated now, and begins the record again. *plain: the
 * bytes that its tensors take uncompressed. */
kvp_asked kvp_asked_take(size_t *plain);

/* The record begins again with each llama.cpp context and at its end: planning (--fit) asks for
 * sizes of caches that are never allocated. */
void kvp_asked_reset(void);

#endif /* KVP_ASKED_H */
