/* llama_states.c - see llama_states.h. */
#include "llama_states.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "ggml_api.h"
#include "host.h"
#include "log.h"
#include "pack.h"

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
} llama;

static atomic_bool served;
static atomic_int n_caches;

/* The state that this thread is saving or restoring with llama.cpp's functions. */
static _Thread_local struct {
    kvp_plain *plain;
    bool measures, failed, restores;
    char refused[256]; /* the first reason; "": no row was refused */
} now;

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
    return now.measures;
}

void kvp_saving_note(const void *at, size_t kept, size_t room)
{
    const uintptr_t first = now.plain != NULL ? (uintptr_t)now.plain->bytes : 0,
                    here = (uintptr_t)at;

    /* a device that splits tensors reads them to other memory first */
    if (first == 0 || here < first || here - first >= now.plain->n)
        return;
    now.failed = now.failed || !kvp_plain_add(now.plain, here - first, kept, room);
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

/* Lets llama.cpp write the state to memory of ours, or only finds its runs. False when it has none,
 * so that there is nothing to pack, and when it cannot be done. Both calls for a state that does
 * not change in between have the same result, because the runs depend only on the caches. */
static bool collect(const which *w, size_t size, bool measures, kvp_plain *plain)
{
    bool done;

    if (!kvp_plain_create(plain, size))
        return false;
    plain->all = w->all;
    now.plain = plain;
    now.measures = measures;
    now.failed = false;
    done = nominal_get(w, plain->bytes, size) == size;
    now.plain = NULL;
    now.measures = false;
    done = done && !now.failed && plain->n_runs > 0;
    if (!done)
        kvp_plain_free(plain);
    return done;
}

static size_t packed_size(const which *w)
{
    const size_t size = nominal_size(w);
    size_t packed = size;
    kvp_plain plain;

    if (size == 0 || !may_pack(w) || !collect(w, size, true, &plain))
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

    if (size >= nominal || !collect(w, nominal, false, &plain))
        return nominal_get(w, to, size);
    packed = kvp_pack_bytes(&plain, 0);
    if (packed <= size)
        kvp_pack(&plain, to);
    kvp_plain_free(&plain);
    return packed <= size ? packed : 0;
}

/* Whether the state has records. Finding out takes no memory, while llama.cpp's functions would
 * write the state twice if there were none. */
static bool has_records(const which *w, size_t size)
{
    kvp_plain plain = { 0 };
    const bool found = size > 0 && collect(w, size, true, &plain);

    if (found)
        kvp_plain_free(&plain);
    return found;
}

/* Writes a packed file. False: there is nothing to pack. */
static bool save(const which *w, const char *path, const int32_t *tokens, size_t n_tokens,
                 size_t *written)
{
    const size_t size = may_pack(w) && n_tokens <= UINT32_MAX ? nominal_size(w) : 0;
    kvp_plain plain;

    if (!has_records(w, size) || !collect(w, size, false, &plain))
        return false;
    *written = kvp_pack_save(&plain, tokens, n_tokens, path) ? kvp_pack_bytes(&plain, n_tokens) : 0;
    if (*written == 0)
        kvp_error("%s: cannot save the state: %s; what was there before is unchanged", path,
                  strerror(errno));
    kvp_plain_free(&plain);
    return true;
}

/* Restoring */

static void report(const char *what, const char *why)
{
    kvp_error("%s: the saved state is not restored: %s", what, why);
}

static void begin_restoring(void)
{
    now.restores = true;
    now.refused[0] = '\0';
}

/* Whether all rows were restored. Otherwise takes back what llama.cpp restored, as llama.cpp does
 * with states that it refuses itself. */
static bool end_restoring(const which *w, const char *what)
{
    void *memory;

    now.restores = false;
    if (now.refused[0] == '\0')
        return true;
    report(what, now.refused);
    memory = llama.get_memory(w->context);
    if (memory != NULL && w->all)
        llama.memory_clear(memory, true);
    else if (memory != NULL)
        llama.memory_seq_rm(memory, w->seq, -1, -1);
    return false;
}

static size_t set_plain(const which *w, const uint8_t *from, size_t size, const char *what)
{
    size_t read;

    begin_restoring();
    read = nominal_set(w, from, size);
    return end_restoring(w, what) ? read : 0;
}

static const char in_memory[] = "a state in memory";

static size_t packed_set(const which *w, const uint8_t *from, size_t size)
{
    kvp_pack_header header;
    kvp_plain plain;
    const char *why;
    size_t read;

    if (!kvp_is_packed(from, size))
        return set_plain(w, from, size, in_memory);
    why = kvp_unpack(from, size, w->all, &plain);
    if (why != NULL) {
        report(in_memory, why);
        return 0;
    }
    memcpy(&header, from, sizeof(header));
    read = set_plain(w, plain.bytes, plain.n, in_memory);
    read = read == plain.n ? (size_t)header.bytes : 0;
    kvp_plain_free(&plain);
    return read;
}

/* Restores a packed file. Without memory for tokens it only counts them. Then a state without
 * tokens is restored, too, because an older llama.cpp does so. Returns the bytes that were read, 0
 * after a line with the reason. */
static size_t load(const which *w, FILE *file, const char *path, kvp_pack_tokens *tokens)
{
    const size_t size = (size_t)kvp_host_file_bytes(file);
    kvp_plain plain = { 0 };
    const char *why = kvp_pack_count(file, &tokens->n);
    bool done = why == NULL;

    if (done && !w->all && tokens->to == NULL && tokens->n > 0)
        return size;
    rewind(file);
    if (done) {
        why = kvp_pack_load(file, w->all, &plain, tokens);
        done = why == NULL && set_plain(w, plain.bytes, plain.n, path) == plain.n;
    }
    if (why != NULL)
        report(path, why);
    kvp_plain_free(&plain);
    return done ? size : 0;
}

/* The file, at its begin, if it is packed. */
static FILE *open_packed(const char *path)
{
    char magic[KVP_STATE_MAGIC_BYTES] = "";
    FILE *file = kvp_host_is_file(path) ? kvp_host_open(path, false) : NULL;

    if (file != NULL && fread(magic, 1, sizeof(magic), file) == sizeof(magic) &&
        kvp_is_packed(magic, sizeof(magic))) {
        rewind(file);
        return file;
    }
    if (file != NULL)
        fclose(file);
    return NULL;
}

/* Restores a packed file. False: it is no packed file. *read: as above. */
static bool load_packed(const which *w, const char *path, int32_t *tokens, size_t room, size_t *n,
                        size_t *read)
{
    kvp_pack_tokens to = { tokens, room, 0 };
    FILE *file = open_packed(path);

    if (file == NULL)
        return false;
    *read = load(w, file, path, &to);
    fclose(file);
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
    begin_restoring();
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
    begin_restoring();
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
