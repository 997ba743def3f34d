/* llama_states.c - see llama_states.h. */
#include "llama_states.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "align.h"
#include "ggml_api.h"
#include "host.h"
#include "log.h"

/* A state with a part of the caches is served like any state. States with other flags go to
 * llama.cpp: the rows of such a state stay in the device's memory, or the flag is not known. */
#define PARTIAL 1u

/* llama.cpp's functions. */
static struct {
    size_t (*get_size)(void *context);
    size_t (*get_data)(void *context, uint8_t *to, size_t size);
    size_t (*set_data)(void *context, const uint8_t *from, size_t size);
    bool (*load_file)(void *context, const char *path, int32_t *tokens, size_t room, size_t *n);
    bool (*save_file)(void *context, const char *path, const int32_t *tokens, size_t n);
    size_t (*seq_get_size)(void *context, int32_t seq, uint32_t flags);
    size_t (*seq_get_data)(void *context, uint8_t *to, size_t size, int32_t seq, uint32_t flags);
    size_t (*seq_set_data)(void *context, const uint8_t *from, size_t size, int32_t seq,
                           uint32_t flags);
    size_t (*seq_load_file)(void *context, const char *path, int32_t seq, int32_t *tokens,
                            size_t room, size_t *n);
    size_t (*seq_save_file)(void *context, const char *path, int32_t seq, const int32_t *tokens,
                            size_t n);
    void *(*get_memory)(const void *context);
    bool (*memory_seq_rm)(void *memory, int32_t seq, int32_t first, int32_t end);
    void (*memory_clear)(void *memory, bool data);
    int32_t (*memory_seq_pos_max)(void *memory, int32_t seq); /* NULL: an older llama.cpp */
    uint32_t (*n_seq_max)(const void *context);               /* likewise */
} llama;

static atomic_bool served;
static atomic_int n_caches;

/* The state that this thread is saving or restoring with llama.cpp's functions. */
static _Thread_local struct {
    kvp_plain *plain;
    kvp_packing *packing; /* NULL: the state is only measured */
    bool placed, failed, restores;
    kvp_unpacking *unpacking; /* of the state that is restored, if it was packed */
    char refused[256];        /* the first reason; "": no row was refused */
    unsigned number;          /* of the state that is restored */
    bool alone;               /* no other sequence has tokens */
    /* notes: the places of rows are noted in `align`, of the tensor that is written first. With
     * `misfit` the state will be restored once more. Without `notes` it may have fillers. */
    kvp_alignment *align;
    bool notes, misfit;
    const void *first;
} now;

static atomic_uint n_restored;

bool kvp_states_are_served(void)
{
    return served;
}

void kvp_states_count(int n)
{
    atomic_fetch_add(&n_caches, n);
}

bool kvp_saving_measures(void)
{
    return now.plain != NULL && now.packing == NULL;
}

/* A device that splits tensors reads them to other memory than the state's first. */
static bool is_of_state(const void *at, size_t room)
{
    return now.plain != NULL && kvp_plain_has(now.plain, at, room);
}

void kvp_saving_note(const void *at, size_t kept, size_t room)
{
    if (is_of_state(at, room))
        now.failed =
            now.failed ||
            !kvp_plain_add(now.plain, (size_t)((const uint8_t *)at - now.plain->bytes), kept, room);
}

uint8_t *kvp_saving_begin(uint8_t *at, size_t kept, size_t room)
{
    uint8_t *place = NULL;

    if (now.packing != NULL && is_of_state(at, room)) {
        place = kvp_packing_place(now.packing, (size_t)(at - now.plain->bytes), kept, room);
        now.failed = now.failed || place == NULL;
    }
    now.placed = place != NULL;
    return now.placed ? place : at;
}

void kvp_saving_end(bool done)
{
    now.failed = now.failed || !done;
    if (now.placed && done)
        kvp_packing_placed(now.packing);
    now.placed = false;
}

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

/* Which state of a context. */
typedef struct which {
    void *context;
    bool all;
    int32_t seq;
    uint32_t flags;
} which;

static size_t nominal_size(const which *w)
{
    return w->all ? llama.get_size(w->context) : llama.seq_get_size(w->context, w->seq, w->flags);
}

static size_t nominal_get(const which *w, uint8_t *to, size_t size)
{
    return w->all ? llama.get_data(w->context, to, size)
                  : llama.seq_get_data(w->context, to, size, w->seq, w->flags);
}

static size_t nominal_set(const which *w, const uint8_t *from, size_t size)
{
    return w->all ? llama.set_data(w->context, from, size)
                  : llama.seq_set_data(w->context, from, size, w->seq, w->flags);
}

/* Saving */

static bool may_pack(const which *w)
{
    return n_caches > 0 && (w->flags & ~PARTIAL) == 0;
}

/* Lets llama.cpp write the state to memory of ours, where only the bytes other than runs arrive,
 * and the runs to `packing`. Without it the runs are only found. Both calls for a state that does
 * not change in between have the same runs, because these depend only on the caches. */
static bool collect(const which *w, kvp_plain *plain, kvp_packing *packing)
{
    bool done;

    now.plain = plain;
    now.packing = packing;
    now.failed = false;
    done = nominal_get(w, plain->bytes, plain->n) == plain->n;
    now.plain = NULL;
    now.packing = NULL;
    return done && !now.failed;
}

/* Finds the runs of a state. False when it has none, so that there is nothing to pack, and when it
 * cannot be done. */
static bool measure(const which *w, size_t size, kvp_plain *plain)
{
    if (size == 0 || !kvp_plain_create(plain, size))
        return false;
    plain->all = w->all;
    if (collect(w, plain, NULL) && plain->n_runs > 0)
        return true;
    kvp_plain_free(plain);
    return false;
}

static size_t packed_size(const which *w)
{
    const size_t size = nominal_size(w);
    size_t packed = size;
    kvp_plain plain;

    if (!may_pack(w) || !measure(w, size, &plain))
        return size;
    packed = kvp_pack_bytes(&plain, 0);
    kvp_plain_free(&plain);
    return packed < size ? packed : size;
}

/* A program that has room for the nominal state gets it. It may not have asked for the size, or not
 * here. */
static size_t packed_get(const which *w, uint8_t *to, size_t size)
{
    const size_t nominal = may_pack(w) ? nominal_size(w) : 0;
    size_t packed;
    kvp_plain plain;
    kvp_packing packing;

    if (size >= nominal || !measure(w, nominal, &plain))
        return nominal_get(w, to, size);
    packed = kvp_pack_bytes(&plain, 0);
    if (packed <= size) {
        kvp_packing_to_memory(&packing, &plain, to);
        packed = kvp_packing_end(&packing, collect(w, &plain, &packing)) ? packed : 0;
    }
    kvp_plain_free(&plain);
    return packed <= size ? packed : 0;
}

/* Writes a packed file. False: there is nothing to pack, or memory for the runs is short. */
static bool save(const which *w, const char *path, const int32_t *tokens, size_t n_tokens,
                 size_t *written)
{
    const size_t size = may_pack(w) && n_tokens <= UINT32_MAX ? nominal_size(w) : 0;
    kvp_plain plain;
    kvp_packing packing;
    bool done;

    if (!measure(w, size, &plain))
        return false;
    done = kvp_packing_to_file(&packing, &plain, tokens, n_tokens, path) &&
           kvp_packing_end(&packing, collect(w, &plain, &packing));
    *written = done ? kvp_pack_bytes(&plain, n_tokens) : 0;
    kvp_plain_free(&plain);
    if (!done && errno != 0)
        kvp_error("%s: cannot save the state: %s; what was there before is unchanged", path,
                  strerror(errno));
    return done || errno != 0;
}

/* Restoring */

static void report(const char *what, const char *why)
{
    kvp_error("%s: the saved state is not restored: %s", what, why);
}

/* Whether no other sequence of the context has tokens. */
static bool is_alone(const which *w)
{
    void *memory = llama.get_memory(w->context);
    const bool known =
        memory != NULL && llama.memory_seq_pos_max != NULL && llama.n_seq_max != NULL;
    const int32_t n = known ? (int32_t)llama.n_seq_max(w->context) : 0;

    for (int32_t seq = 0; seq < n && !w->all; seq++)
        if (seq != w->seq && llama.memory_seq_pos_max(memory, seq) >= 0)
            return false;
    return w->all || known;
}

static void begin_restoring(const which *w)
{
    now.restores = true;
    now.refused[0] = '\0';
    now.alone = is_alone(w);
    now.number = atomic_fetch_add(&n_restored, 1) + 1;
}

/* Takes back what llama.cpp restored, as llama.cpp does with states that it refuses itself. */
static void take_back(const which *w)
{
    void *memory = llama.get_memory(w->context);

    if (memory != NULL && w->all)
        llama.memory_clear(memory, true);
    else if (memory != NULL)
        llama.memory_seq_rm(memory, w->seq, -1, -1);
}

/* Whether all rows were restored. Otherwise takes them back. */
static bool end_restoring(const which *w, const char *what)
{
    now.restores = false;
    if (now.refused[0] == '\0')
        return true;
    report(what, now.refused);
    take_back(w);
    return false;
}

static size_t set_state(const which *w, const uint8_t *from, size_t size, kvp_unpacking *unpacking,
                        const char *what)
{
    size_t read;

    begin_restoring(w);
    now.unpacking = unpacking;
    read = nominal_set(w, from, size);
    now.unpacking = NULL;
    return end_restoring(w, what) ? read : 0;
}

/* Whether a state replaces nothing. */
static bool is_empty(const which *w)
{
    void *memory = llama.get_memory(w->context);

    return !w->all && memory != NULL && llama.memory_seq_pos_max != NULL &&
           llama.memory_seq_pos_max(memory, w->seq) < 0;
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

static void try(const which *w, const kvp_pack_source *source, kvp_pack_tokens *tokens,
                const char *what, attempt *t)
{
    kvp_unpacking u;
    const char *why = kvp_unpacking_begin(&u, source, w->all, t->early, tokens, align_state, t);

    t->done = t->again = t->misfit = false;
    if (why == NULL && !u.early)
        why = kvp_unpacking_finish(&u);
    if (why != NULL)
        report(what, why);
    if (why == NULL) {
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
static bool remove_fillers(const which *w, const attempt *t)
{
    void *memory = llama.get_memory(w->context);

    return t->align.position == 0 || (t->done && memory != NULL &&
                                      llama.memory_seq_rm(memory, w->seq, t->align.position, -1));
}

/* Restores a state to cells that its blocks fit. If that cannot be done, rows are decoded. */
static void align(const which *w, const kvp_pack_source *source, kvp_pack_tokens *tokens,
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

/* All runs are checked before llama.cpp sees the state, unless its sequence is empty, so that a
 * damaged state takes nothing away. */
static bool set_packed(const which *w, const kvp_pack_source *source, kvp_pack_tokens *tokens,
                       const char *what)
{
    attempt t = { .early = is_empty(w), .notes = !w->all };

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

static const char in_memory[] = "a state in memory";

static size_t packed_set(const which *w, const uint8_t *from, size_t size)
{
    const kvp_pack_source source = { .from = from, .n = size };
    kvp_pack_header header;

    if (!kvp_is_packed(from, size))
        return set_state(w, from, size, NULL, in_memory);
    if (!set_packed(w, &source, NULL, in_memory))
        return 0;
    memcpy(&header, from, sizeof(header));
    return (size_t)header.bytes;
}

/* Restores a packed file. Without memory for tokens it only counts them. Then a state without
 * tokens is restored, too, because an older llama.cpp does so. Returns the bytes that were read, 0
 * after a line with the reason. */
static size_t load(const which *w, int file, const char *path, kvp_pack_tokens *tokens)
{
    const kvp_pack_source source = { .file = file };
    uint64_t size = 0;
    const char *why = kvp_pack_count(file, &tokens->n);

    if (why != NULL || !kvant_os_size(file, &size)) {
        report(path, why != NULL ? why : strerror(errno));
        return 0;
    }
    if (!w->all && tokens->to == NULL && tokens->n > 0)
        return (size_t)size;
    return set_packed(w, &source, tokens, path) ? (size_t)size : 0;
}

/* Opens the file if it is packed. */
static bool open_packed(const char *path, int *file)
{
    char magic[KVP_STATE_MAGIC_BYTES] = "";

    if (!kvp_host_is_file(path) || !kvant_os_open(path, file))
        return false;
    if (kvant_os_read_at(*file, magic, sizeof(magic), 0) && kvp_is_packed(magic, sizeof(magic)))
        return true;
    kvant_os_close(*file);
    return false;
}

/* Restores a packed file. False: it is no packed file. *read: as above. */
static bool load_packed(const which *w, const char *path, int32_t *tokens, size_t room, size_t *n,
                        size_t *read)
{
    kvp_pack_tokens to = { tokens, room, 0 };
    int file;

    if (!open_packed(path, &file))
        return false;
    *read = load(w, file, path, &to);
    kvant_os_close(file);
    if (*read > 0)
        *n = to.n;
    return true;
}

/* The functions in place of llama.cpp's */

static size_t get_size(void *context)
{
    return packed_size(&(which){ .context = context, .all = true });
}

static size_t get_data(void *context, uint8_t *to, size_t size)
{
    return packed_get(&(which){ .context = context, .all = true }, to, size);
}

static size_t set_data(void *context, const uint8_t *from, size_t size)
{
    return packed_set(&(which){ .context = context, .all = true }, from, size);
}

static bool load_file(void *context, const char *path, int32_t *tokens, size_t room, size_t *n)
{
    const which w = { .context = context, .all = true };
    size_t read;
    bool done;

    if (load_packed(&w, path, tokens, room, n, &read))
        return read > 0;
    begin_restoring(&w);
    done = llama.load_file(context, path, tokens, room, n);
    return end_restoring(&w, path) && done;
}

static bool save_file(void *context, const char *path, const int32_t *tokens, size_t n)
{
    size_t written;

    return save(&(which){ .context = context, .all = true }, path, tokens, n, &written)
               ? written > 0
               : llama.save_file(context, path, tokens, n);
}

static size_t seq_get_size_ext(void *context, int32_t seq, uint32_t flags)
{
    return packed_size(&(which){ context, false, seq, flags });
}

static size_t seq_get_data_ext(void *context, uint8_t *to, size_t size, int32_t seq, uint32_t flags)
{
    return packed_get(&(which){ context, false, seq, flags }, to, size);
}

static size_t seq_set_data_ext(void *context, const uint8_t *from, size_t size, int32_t seq,
                               uint32_t flags)
{
    return packed_set(&(which){ context, false, seq, flags }, from, size);
}

static size_t seq_get_size(void *context, int32_t seq)
{
    return seq_get_size_ext(context, seq, 0);
}

static size_t seq_get_data(void *context, uint8_t *to, size_t size, int32_t seq)
{
    return seq_get_data_ext(context, to, size, seq, 0);
}

static size_t seq_set_data(void *context, const uint8_t *from, size_t size, int32_t seq)
{
    return seq_set_data_ext(context, from, size, seq, 0);
}

static size_t seq_load_file(void *context, const char *path, int32_t seq, int32_t *tokens,
                            size_t room, size_t *n)
{
    const which w = { .context = context, .seq = seq };
    size_t read;

    if (load_packed(&w, path, tokens, room, n, &read))
        return read;
    begin_restoring(&w);
    read = llama.seq_load_file(context, path, seq, tokens, room, n);
    return end_restoring(&w, path) ? read : 0;
}

static size_t seq_save_file(void *context, const char *path, int32_t seq, const int32_t *tokens,
                            size_t n)
{
    size_t written;

    return save(&(which){ .context = context, .seq = seq }, path, tokens, n, &written)
               ? written
               : llama.seq_save_file(context, path, seq, tokens, n);
}

/* Taking the functions over */

typedef void function(void);

/* ISO C has no cast from a function pointer to an object pointer. */
static void *address_of(function *code)
{
    void *address;

    memcpy(&address, &code, sizeof(address));
    return address;
}

#define TAKEN(which) { .name = "llama_state_" #which, .ours = address_of((function *)which) }

/* Finds llama.cpp's functions in its library. False when some are missing, or when the library
 * works with another ggml than the one that loaded the plug-in. */
static bool find_functions(void *library)
{
    const struct {
        const char *name;
        void *slot;
    } symbols[] = {
        { "llama_state_get_size", &llama.get_size },
        { "llama_state_get_data", &llama.get_data },
        { "llama_state_set_data", &llama.set_data },
        { "llama_state_load_file", &llama.load_file },
        { "llama_state_save_file", &llama.save_file },
        { "llama_state_seq_get_size_ext", &llama.seq_get_size },
        { "llama_state_seq_get_data_ext", &llama.seq_get_data },
        { "llama_state_seq_set_data_ext", &llama.seq_set_data },
        { "llama_state_seq_load_file", &llama.seq_load_file },
        { "llama_state_seq_save_file", &llama.seq_save_file },
        { "llama_get_memory", &llama.get_memory },
        { "llama_memory_seq_rm", &llama.memory_seq_rm },
        { "llama_memory_clear", &llama.memory_clear },
    };
    size_t (*nbytes)(const abi_tensor *tensor) = kvp_api.nbytes;
    void *address = kvant_os_symbol(library, "ggml_nbytes");
    bool found = memcmp(&address, &nbytes, sizeof(address)) == 0;

    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]) && found; i++) {
        address = kvant_os_symbol(library, symbols[i].name);
        memcpy(symbols[i].slot, &address, sizeof(address));
        found = address != NULL;
    }
    address = kvant_os_symbol(library, "llama_memory_seq_pos_max");
    memcpy(&llama.memory_seq_pos_max, &address, sizeof(address));
    address = kvant_os_symbol(library, "llama_n_seq_max");
    memcpy(&llama.n_seq_max, &address, sizeof(address));
    return found;
}

const char *kvp_states_serve(void)
{
    kvp_import imports[] = {
        TAKEN(get_size),         TAKEN(get_data),         TAKEN(set_data),
        TAKEN(load_file),        TAKEN(save_file),        TAKEN(seq_get_size_ext),
        TAKEN(seq_get_data_ext), TAKEN(seq_set_data_ext), TAKEN(seq_get_size),
        TAKEN(seq_get_data),     TAKEN(seq_set_data),     TAKEN(seq_load_file),
        TAKEN(seq_save_file),
    };
    const size_t n = sizeof(imports) / sizeof(imports[0]);
    const char *why;
    void *of = NULL, *library;
    bool same = true, found;

    if (served)
        return NULL;
    if (!kvp_host_find_imports(imports, n, &why))
        return why;
    for (size_t i = 0; i < n; i++)
        of = imports[i].theirs != NULL ? imports[i].theirs : of;
    library = of != NULL ? kvp_host_library_of(of) : NULL;
    if (library == NULL)
        return "no module of the program imports the functions: it has llama.cpp linked in, or "
               "looks them up";
    for (size_t i = 0; i < n && same; i++)
        same = imports[i].theirs == NULL ||
               imports[i].theirs == kvant_os_symbol(library, imports[i].name);
    found = same && find_functions(library);
    kvant_os_close_library(library);
    if (!found)
        return "llama.cpp's library lacks one of the functions, or works with another ggml";
    if (!kvp_host_replace_imports(imports, n))
        return "the program's table of functions cannot be written";
    served = true;
    return NULL;
}
