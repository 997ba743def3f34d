/* unused_rows.c - see unused_rows.h. */
#include "unused_rows.h"

#include <stdint.h>

#include "kv_tensor.h"

/* The question that this thread asks llama.cpp. */
static _Thread_local struct {
    bool asks;
    kvp_kv *first; /* the first tensor that was read; its cache counts */
    bool failed;   /* there are several caches, or a tensor is not on a GPU */
} now;

bool kvp_unused_asks(kvp_kv *kv, size_t offset, size_t size)
{
    const size_t row = kvp_kv_row_bytes(kv);

    if (!now.asks)
        return false;
    now.failed = now.failed || kv->remote == NULL || kv->cells == NULL ||
                 (now.first != NULL && now.first->cache != kv->cache);
    if (!now.failed)
        kv->remote->hold(kv, offset / row, (size + row - 1) / row, now.first == NULL);
    now.first = now.first != NULL ? now.first : kv;
    return true;
}

/* llama.cpp writes the state of a sequence to reserved memory. Bytes of caches do not arrive. */
static bool ask(void *context, int32_t seq)
{
    const size_t size = kvp_llama.seq_get_size(context, seq, 0);
    kvp_plain plain;
    bool done;

    if (size == 0 || !kvp_plain_create(&plain, size))
        return false;
    done = kvp_llama.seq_get_data(context, plain.bytes, size, seq, 0) == size;
    kvp_plain_free(&plain);
    return done;
}

void kvp_unused_forget(const kvp_which *w)
{
    void *memory = kvp_llama.get_memory(w->context);
    bool ok = memory != NULL && kvp_llama.memory_seq_pos_max != NULL && kvp_llama.n_seq_max != NULL;
    const int32_t n = ok ? (int32_t)kvp_llama.n_seq_max(w->context) : 0;

    now.asks = true;
    now.first = NULL;
    now.failed = false;
    for (int32_t seq = 0; seq < n && ok && !now.failed; seq++)
        ok = kvp_llama.memory_seq_pos_max(memory, seq) < 0 || ask(w->context, seq);
    now.asks = false;
    if (ok && !now.failed && now.first != NULL)
        now.first->remote->forget_others(now.first);
}
