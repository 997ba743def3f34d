/* unused_rows.h - forgets rows on a GPU that no sequence has any more.
 *
 * llama.cpp frees cells without a word. On a GPU their rows keep exact pages and ids of transforms,
 * which a restored state needs. Before a state is restored next to other sequences, llama.cpp is
 * asked for the states of all sequences, and reads exactly the cells that they have. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "llama_calls.h"

struct kvp_kv;

/* Forgets the unused rows of a context with one cache. Other contexts are left as they are. */
void kvp_unused_forget(const kvp_which *w);

/* Called when bytes of a cache tensor are read. True: only their cells are asked for, and the bytes
 * need not be written. */
bool kvp_unused_asks(struct kvp_kv *kv, size_t offset, size_t size);
