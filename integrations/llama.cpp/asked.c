/* asked.c - see asked.h. */
#include "asked.h"

#include <stdlib.h>
#include <string.h>

#include "kv_tensor.h"

static _Thread_local struct {
    bool keys, values;
    size_t plain, latents;
    uint32_t n_keys, n_values, n_latents;
    /* the layers of the keys and of the values whose sizes were asked for last */
    unsigned long layer[2];
    bool begins;
} asked;

/* Tensors of the buffer that was allocated last and that have no address yet: latents, and keys and
 * values. */
static _Thread_local uint32_t placing, placing_cache;

static void forget(void)
{
    memset(&asked, 0, sizeof(asked));
}

void kvp_asked_reset(void)
{
    forget();
    placing = placing_cache = 0;
}

bool kvp_asked_begins(void)
{
    return asked.begins && placing_cache == 0;
}

void kvp_asked_note_latents(size_t bytes)
{
    asked.latents += bytes;
    asked.n_latents++;
}

size_t kvp_asked_latents(void)
{
    placing = !asked.values && asked.n_keys == asked.n_latents ? asked.n_latents : 0;
    return placing > 0 ? asked.latents : 0;
}

bool kvp_asked_places_latents(void)
{
    return placing > 0;
}

void kvp_asked_placed(void)
{
    forget();
    placing -= placing > 0;
    placing_cache -= placing_cache > 0;
}

/* llama.cpp names a layer's recurrent state cache_r_l<layer> and cache_s_l<layer>. */
static void note_state(const abi_tensor *tensor)
{
    const char *name = tensor->name;

    if (tensor->view_src == NULL &&
        (strncmp(name, "cache_r_l", 9) == 0 || strncmp(name, "cache_s_l", 9) == 0))
        kvp_kv_note_state((uint32_t)strtoul(name + 9, NULL, 10));
}

static void note_layer(int role, unsigned long layer)
{
    const uint32_t n[2] = { asked.n_keys, asked.n_values };

    asked.begins = n[role] == 0 || layer <= asked.layer[role];
    asked.layer[role] = layer;
}

bool kvp_asked_note(const abi_tensor *tensor, size_t plain)
{
    if (tensor->ne[0] == 0)
        return false;
    asked.plain += plain;
    note_state(tensor);
    if (tensor->view_src != NULL || !kvp_kv_names(tensor))
        return false;
    note_layer(tensor->name[6] == 'v', strtoul(tensor->name + 9, NULL, 10));
    asked.n_keys += tensor->name[6] == 'k';
    asked.n_values += tensor->name[6] == 'v';
    asked.keys = asked.keys || tensor->name[6] == 'k';
    asked.values = asked.values || tensor->name[6] == 'v';
    return true;
}

kvp_asked kvp_asked_take(size_t *plain)
{
    const kvp_asked keys = asked.keys ? KVP_ASKED_KEYS : KVP_ASKED_OTHER;
    const kvp_asked what = asked.values ? KVP_ASKED_CACHE : keys;

    *plain = asked.plain;
    placing_cache = what == KVP_ASKED_CACHE ? asked.n_keys + asked.n_values : 0;
    forget();
    return what;
}
