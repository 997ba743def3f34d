/* asked.c - see asked.h. */
#include "asked.h"

#include <stdlib.h>
#include <string.h>

#include "kv_tensor.h"

static _Thread_local struct {
    bool keys, values;
    size_t plain, latents;
    uint32_t n_keys, n_latents;
} asked;

static _Thread_local uint32_t placing; /* tensors of latents */

static void forget(void)
{
    memset(&asked, 0, sizeof(asked));
}

void kvp_asked_reset(void)
{
    forget();
    placing = 0;
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
}

/* llama.cpp names a layer's recurrent state cache_r_l<layer> and cache_s_l<layer>. */
static void note_state(const abi_tensor *tensor)
{
    const char *name = tensor->name;

    if (tensor->view_src == NULL &&
        (strncmp(name, "cache_r_l", 9) == 0 || strncmp(name, "cache_s_l", 9) == 0))
        kvp_kv_note_state((uint32_t)strtoul(name + 9, NULL, 10));
}

bool kvp_asked_note(const abi_tensor *tensor, size_t plain)
{
    if (tensor->ne[0] == 0)
        return false;
    asked.plain += plain;
    note_state(tensor);
    if (tensor->view_src != NULL || !kvp_kv_names(tensor))
        return false;
    asked.n_keys += tensor->name[6] == 'k';
    asked.keys = asked.keys || tensor->name[6] == 'k';
    asked.values = asked.values || tensor->name[6] == 'v';
    return true;
}

kvp_asked kvp_asked_take(size_t *plain)
{
    const kvp_asked keys = asked.keys ? KVP_ASKED_KEYS : KVP_ASKED_OTHER;
    const kvp_asked what = asked.values ? KVP_ASKED_CACHE : keys;

    *plain = asked.plain;
    forget();
    return what;
}
