/* buffer_requests.c - see buffer_requests.h. */
#include "buffer_requests.h"

#include <stdlib.h>
#include <string.h>

#include "kv_tensor.h"

static _Thread_local struct {
    bool keys, values;
    size_t plain, latents, cache;
    uint32_t n_keys, n_values, n_latents;
    /* the layers of the keys and of the values whose sizes were asked for last */
    unsigned long layer[2];
    bool begins;
} requests;

/* Tensors of the buffer that was allocated last and that have no address yet: latents, and keys and
 * values. */
static _Thread_local uint32_t placing, placing_cache;

static void forget(void)
{
    memset(&requests, 0, sizeof(requests));
}

void kvp_requests_reset(void)
{
    forget();
    placing = placing_cache = 0;
}

bool kvp_requests_begin_cache(void)
{
    return requests.begins && placing_cache == 0;
}

void kvp_requests_note_latents(size_t bytes)
{
    requests.latents += bytes;
    requests.n_latents++;
}

void kvp_requests_note_cache(size_t bytes)
{
    requests.cache += bytes;
}

size_t kvp_requests_cache(void)
{
    return requests.cache;
}

size_t kvp_requests_latents(void)
{
    placing = !requests.values && requests.n_keys == requests.n_latents ? requests.n_latents : 0;
    return placing > 0 ? requests.latents : 0;
}

bool kvp_requests_place_latents(void)
{
    return placing > 0;
}

void kvp_requests_placed(void)
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
    const uint32_t n[2] = { requests.n_keys, requests.n_values };

    requests.begins = n[role] == 0 || layer <= requests.layer[role];
    requests.layer[role] = layer;
}

bool kvp_requests_note(const abi_tensor *tensor, size_t plain)
{
    if (tensor->ne[0] == 0)
        return false;
    requests.plain += plain;
    note_state(tensor);
    if (tensor->view_src != NULL || !kvp_kv_is_cache_tensor(tensor))
        return false;
    note_layer(tensor->name[6] == 'v', strtoul(tensor->name + 9, NULL, 10));
    requests.n_keys += tensor->name[6] == 'k';
    requests.n_values += tensor->name[6] == 'v';
    requests.keys = requests.keys || tensor->name[6] == 'k';
    requests.values = requests.values || tensor->name[6] == 'v';
    return true;
}

kvp_buffer_kind kvp_requests_finish(size_t *plain)
{
    const kvp_buffer_kind keys = requests.keys ? KVP_BUFFER_KEYS : KVP_BUFFER_OTHER;
    const kvp_buffer_kind what = requests.values ? KVP_BUFFER_CACHE : keys;

    *plain = requests.plain;
    placing_cache = what == KVP_BUFFER_CACHE ? requests.n_keys + requests.n_values : 0;
    forget();
    return what;
}
