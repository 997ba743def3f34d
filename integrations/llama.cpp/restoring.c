/* restoring.c - attempts to restore a state by llama.cpp's functions (llama_calls.h), and what
 * cache tensors ask and tell meanwhile (llama_states.h).
 *
 * A packed state is first restored while it is read. It is restored again if something read bytes
 * before they were there, or if codes do not fit llama.cpp's cells (align.h). */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "align.h"
#include "llama_calls.h"
#include "llama_states.h"
#include "log.h"
#include "unused_rows.h"

/* The state that this thread restores with llama.cpp's functions. */
static _Thread_local struct {
    bool restores;
    kvp_unpacking *unpacking; /* of the state, if it was packed */
    char refused[256];        /* the first reason; "": no row was refused */
    unsigned number;          /* of the state */
    bool alone;               /* no other sequence has tokens */
    /* With `notes` the places of the first tensor's rows are noted in `align`. With `misfit` the
     * state will be restored once more. Without `notes` it may have fillers. */
    kvp_alignment *align;
    bool notes, misfit;
    const void *first;
} now;

static atomic_uint n_restored;

/* Calls of cache tensors */

bool kvp_restoring_is_checked(const void *bytes, size_t n)
{
    return now.unpacking != NULL && kvp_unpacking_has(now.unpacking, bytes, n);
}

const void *kvp_restoring_wait(const void *bytes, size_t n, bool moves)
{
    if (now.unpacking == NULL)
        return bytes;
    if (kvp_plain_has(&now.unpacking->plain, bytes, n))
        return kvp_unpacking_wait(now.unpacking, bytes, n, moves);
    now.notes = false; /* fillers are found by the addresses of bytes */
    return bytes;
}

unsigned kvp_restoring_number(bool *alone)
{
    *alone = now.restores && now.alone;
    return now.restores ? now.number : 0;
}

bool kvp_restoring_note(const void *tensor, const kvp_align_place *places, size_t n, bool fits)
{
    if (!now.notes)
        return false;
    now.first = now.first != NULL ? now.first : tensor;
    if (tensor == now.first) {
        now.misfit = now.misfit || !fits;
        now.notes = kvp_align_note(now.align, places, n);
    }
    return now.misfit;
}

bool kvp_restoring_ignores(const void *tensor)
{
    return now.misfit && tensor != now.first;
}

const bool *kvp_restoring_fillers(const void *bytes, size_t *n)
{
    return now.align != NULL && !now.notes && now.unpacking != NULL
               ? kvp_align_fillers(now.align, &now.unpacking->plain, bytes, n)
               : NULL;
}

bool kvp_restoring_refuse(const char *why)
{
    if (now.restores && now.refused[0] == '\0')
        snprintf(now.refused, sizeof(now.refused), "%s", why);
    return now.restores;
}

/* Attempts */

static size_t nominal_set(const kvp_which *w, const uint8_t *from, size_t size)
{
    return w->all ? kvp_llama.set_data(w->context, from, size)
                  : kvp_llama.seq_set_data(w->context, from, size, w->seq, w->flags);
}

void kvp_restoring_report(const char *what, const char *why)
{
    kvp_error("%s: the saved state is not restored: %s", what, why);
}

/* Whether no other sequence of the context has tokens. */
static bool is_alone(const kvp_which *w)
{
    void *memory = kvp_llama.get_memory(w->context);
    const bool known =
        memory != NULL && kvp_llama.memory_seq_pos_max != NULL && kvp_llama.n_seq_max != NULL;
    const int32_t n = known ? (int32_t)kvp_llama.n_seq_max(w->context) : 0;

    for (int32_t seq = 0; seq < n && !w->all; seq++)
        if (seq != w->seq && kvp_llama.memory_seq_pos_max(memory, seq) >= 0)
            return false;
    return w->all || known;
}

void kvp_restoring_begin(const kvp_which *w)
{
    now.restores = true;
    now.refused[0] = '\0';
    now.alone = is_alone(w);
    if (!now.alone)
        kvp_unused_forget(w);
    now.number = atomic_fetch_add(&n_restored, 1) + 1;
}

/* Takes back what llama.cpp restored, as llama.cpp does with states that it refuses itself. */
static void take_back(const kvp_which *w)
{
    void *memory = kvp_llama.get_memory(w->context);

    if (memory != NULL && w->all)
        kvp_llama.memory_clear(memory, true);
    else if (memory != NULL)
        kvp_llama.memory_seq_rm(memory, w->seq, -1, -1);
}

/* Whether all rows were restored. Otherwise takes them back. */
bool kvp_restoring_end(const kvp_which *w, const char *what)
{
    now.restores = false;
    if (now.refused[0] == '\0')
        return true;
    kvp_restoring_report(what, now.refused);
    take_back(w);
    return false;
}

static size_t set_state(const kvp_which *w, const uint8_t *from, size_t size,
                        kvp_unpacking *unpacking, const char *what)
{
    size_t read;

    kvp_restoring_begin(w);
    now.unpacking = unpacking;
    read = nominal_set(w, from, size);
    now.unpacking = NULL;
    return kvp_restoring_end(w, what) ? read : 0;
}

size_t kvp_restoring_plain(const kvp_which *w, const uint8_t *from, size_t size, const char *what)
{
    return set_state(w, from, size, NULL, what);
}

/* Whether a state replaces nothing. */
static bool is_empty(const kvp_which *w)
{
    void *memory = kvp_llama.get_memory(w->context);

    return !w->all && memory != NULL && kvp_llama.memory_seq_pos_max != NULL &&
           kvp_llama.memory_seq_pos_max(memory, w->seq) < 0;
}

/* A way to restore a packed state, and what became of it. */
typedef struct attempt {
    bool early; /* llama.cpp gets runs while further ones are read */
    bool notes; /* places are noted in `align`; otherwise it may have fillers for the state */
    kvp_alignment align;
    bool done;
    /* something else than a compressed cache may have read bytes of runs before they were there */
    bool again;
    bool misfit; /* codes do not fit the cells that llama.cpp chose */
} attempt;

static void align_state(kvp_plain *plain, void *of)
{
    attempt *t = of;

    if (!t->notes && t->align.is_filler != NULL)
        kvp_align_state(&t->align, plain);
}

static void try(const kvp_which *w, const kvp_pack_source *source, kvp_pack_tokens *tokens,
                const char *what, attempt *t)
{
    kvp_unpacking u;
    const char *why = kvp_unpacking_begin(&u, source, w->all, t->early, tokens, align_state, t);

    t->done = t->again = t->misfit = false;
    if (why == NULL && !u.early)
        why = kvp_unpacking_finish(&u);
    if (why != NULL) {
        kvp_restoring_report(what, why);
    } else {
        now.align = &t->align;
        now.notes = t->notes;
        now.misfit = false;
        now.first = NULL;
        t->done = set_state(w, u.plain.bytes, u.plain.n, &u, what) == u.plain.n;
        t->misfit = t->done && now.misfit;
        t->again = t->done && !t->misfit && u.early && (u.missed || u.n_seen < u.plain.n_runs);
        now.align = NULL;
        now.notes = now.misfit = false;
    }
    kvp_unpacking_free(&u);
}

/* Removes the fillers. llama.cpp may have no free cells for them. */
static bool remove_fillers(const kvp_which *w, const attempt *t)
{
    void *memory = kvp_llama.get_memory(w->context);

    return t->align.position == 0 ||
           (t->done && memory != NULL &&
            kvp_llama.memory_seq_rm(memory, w->seq, t->align.position, -1));
}

/* Restores a state to cells that its blocks fit. If that cannot be done, rows are decoded. */
static void align(const kvp_which *w, const kvp_pack_source *source, kvp_pack_tokens *tokens,
                  const char *what, attempt *t)
{
    take_back(w);
    t->notes = false;
    kvp_align_plan(&t->align);
    try(w, source, tokens, what, t);
    if (remove_fillers(w, t))
        return;
    if (t->done)
        take_back(w);
    kvp_align_free(&t->align);
    try(w, source, tokens, what, t);
}

bool kvp_restoring_packed(const kvp_which *w, const kvp_pack_source *source,
                          kvp_pack_tokens *tokens, const char *what)
{
    /* A damaged state that is refused late leaves its first layers' transforms in the cache. */
    attempt t = { .early = is_empty(w) && is_alone(w), .notes = !w->all };

    try(w, source, tokens, what, &t);
    if (t.misfit)
        align(w, source, tokens, what, &t);
    if (t.again) {
        take_back(w);
        t.early = t.notes = false;
        try(w, source, tokens, what, &t);
        t.done = remove_fillers(w, &t) && t.done;
    }
    kvp_align_free(&t.align);
    return t.done;
}
