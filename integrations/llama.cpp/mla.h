/* mla.h - caches of multi-head latent attention (MLA): which rows they have, and their codecs.
 *
 * A token has one row: latents, then 64 channels that RoPE rotates. All query heads read the row as
 * a key and its latents as a value. kvant cuts the row into parts of 64 numbers. The parts are the
 * kv heads of its tensor. So the RoPE channels may have a codec of their own. ops_attention.c
 * computes attention.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvant/scheme.h>

#include "settings.h"

/* RoPE's channels in every model with MLA that llama.cpp runs. The number of latents is a multiple
 * of them. */
#define KVP_MLA_PART 64u
#define KVP_MLA_MAX_PARTS 32u

/* Whether a cache of keys without values with such rows holds latents. Other caches of keys without
 * values have rows of a power of two: an indexer's keys 128, DeepSeek 4's rows 512. */
bool kvp_mla_has_row(uint64_t row);

/* Writes the spec for latents: the keys' spec without the options that learn from rows or queries.
 * A matrix that is learned for keys would spoil the values. False when it does not fit. */
bool kvp_mla_spec(const char *keys, char *spec, size_t size);

/* Writes the spec for RoPE's channels, which have 8 bits. They are a ninth of the row in most
 * models, and they have outliers: DeepSeek's own fp8 cache (FlashMLA) keeps them as bf16. */
bool kvp_mla_rope_spec(const char *keys, char *spec, size_t size);

/* Finds the codecs of the parts of a row with `row` numbers. Ignores the place's role, n_kv_heads
 * and head_dim. False when the settings have no codec for latents; kvant_error_message() says
 * why. */
bool kvp_mla_codecs(const kvp_settings *settings, const kvant_scheme_location *location,
                    uint32_t row, const kvant_codec **codecs);

/* Bytes of a tensor with these params, for a protected or an ordinary layer, whichever needs more;
 * 0 as above. */
size_t kvp_mla_most_bytes(const kvp_settings *settings, const kvant_scheme_location *location,
                          uint32_t row, const kvant_tensor_params *params);

/* "; MLA: latents trellis-4, RoPE channels int-8", for the line at the start. */
void kvp_mla_describe(const kvp_settings *settings, char *text, size_t size);
