/* llama_states.c - see llama_states.h. */
#include "llama_states.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "ggml_api.h"
#include "host.h"
#include "llama_calls.h"
#include "log.h"

/* A state with a part of the caches is served like any state. States with other flags go to
 * llama.cpp: the rows of such a state stay in the device's memory, or the flag is not known. */
#define PARTIAL 1u

kvp_llama_calls kvp_llama;

static atomic_bool served;
static atomic_int n_caches;

/* The state that this thread saves with llama.cpp's functions. */
static _Thread_local struct {
    kvp_plain *plain;
    kvp_packing *packing; /* NULL: the state is only measured */
    bool placed, failed;
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

static size_t nominal_size(const kvp_which *w)
{
    return w->all ? kvp_llama.get_size(w->context)
                  : kvp_llama.seq_get_size(w->context, w->seq, w->flags);
}

static size_t nominal_get(const kvp_which *w, uint8_t *to, size_t size)
{
    return w->all ? kvp_llama.get_data(w->context, to, size)
                  : kvp_llama.seq_get_data(w->context, to, size, w->seq, w->flags);
}

/* Saving */

static bool may_pack(const kvp_which *w)
{
    return n_caches > 0 && (w->flags & ~PARTIAL) == 0;
}

/* Lets llama.cpp write the state to memory of ours, where only the bytes other than runs arrive,
 * and the runs to `packing`. Without it the runs are only found. Both calls for a state that does
 * not change in between have the same runs, because these depend only on the caches. */
static bool collect(const kvp_which *w, kvp_plain *plain, kvp_packing *packing)
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
static bool measure(const kvp_which *w, size_t size, kvp_plain *plain)
{
    if (size == 0 || !kvp_plain_create(plain, size))
        return false;
    plain->all = w->all;
    if (collect(w, plain, NULL) && plain->n_runs > 0)
        return true;
    kvp_plain_free(plain);
    return false;
}

static size_t packed_size(const kvp_which *w)
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
static size_t packed_get(const kvp_which *w, uint8_t *to, size_t size)
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

static void report_unsaved(const char *path)
{
    kvp_error("%s: cannot save the state: %s; what was there before is unchanged", path,
              strerror(errno));
}

/* Writes a packed file. False: there is nothing to pack, or memory for the runs is short. */
static bool save_packed(const kvp_which *w, const char *path, const int32_t *tokens,
                        size_t n_tokens, size_t *written)
{
    const size_t size = n_tokens <= UINT32_MAX ? nominal_size(w) : 0;
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
        report_unsaved(path);
    return done || errno != 0;
}

static size_t nominal_save(const kvp_which *w, const char *path, const int32_t *tokens, size_t n)
{
    return w->all ? kvp_llama.save_file(w->context, path, tokens, n)
                  : kvp_llama.seq_save_file(w->context, path, w->seq, tokens, n);
}

/* Lets llama.cpp write the file, under another name until it is whole: a server that is killed
 * while it saves leaves the old file. */
static size_t save_nominal(const kvp_which *w, const char *path, const int32_t *tokens, size_t n)
{
    char *name = malloc(KVP_MOST_PATH);
    size_t written = 0;
    int file;

    errno = ENOMEM;
    if (name != NULL && kvp_host_create(path, name, KVP_MOST_PATH, &file)) {
        written = nominal_save(w, name, tokens, n);
        if (!kvp_host_finish(file, path, name, written > 0) && written > 0) {
            report_unsaved(path);
            written = 0;
        }
    } else {
        report_unsaved(path);
    }
    free(name);
    return written;
}

/* Returns the bytes that were written, or 0. A process without caches of ours has llama.cpp's own
 * files. */
static size_t save(const kvp_which *w, const char *path, const int32_t *tokens, size_t n)
{
    size_t written;

    if (!may_pack(w))
        return nominal_save(w, path, tokens, n);
    return save_packed(w, path, tokens, n, &written) ? written : save_nominal(w, path, tokens, n);
}

static const char in_memory[] = "a state in memory";

static size_t packed_set(const kvp_which *w, const uint8_t *from, size_t size)
{
    const kvp_pack_source source = { .from = from, .n = size };
    kvp_pack_header header;

    if (!kvp_is_packed(from, size))
        return kvp_restoring_plain(w, from, size, in_memory);
    if (!kvp_restoring_packed(w, &source, NULL, in_memory))
        return 0;
    memcpy(&header, from, sizeof(header));
    return (size_t)header.bytes;
}

/* Restores a packed file. Without memory for tokens it only counts them. Then a state without
 * tokens is restored, too, because an older llama.cpp does so. Returns the bytes that were read, 0
 * after a line with the reason. */
static size_t load(const kvp_which *w, int file, const char *path, kvp_pack_tokens *tokens)
{
    const kvp_pack_source source = { .file = file };
    uint64_t size = 0;
    const char *why = kvp_pack_count(file, &tokens->n);

    if (why != NULL || !kvant_os_size(file, &size)) {
        kvp_restoring_report(path, why != NULL ? why : strerror(errno));
        return 0;
    }
    if (!w->all && tokens->to == NULL && tokens->n > 0)
        return (size_t)size;
    return kvp_restoring_packed(w, &source, tokens, path) ? (size_t)size : 0;
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
static bool load_packed(const kvp_which *w, const char *path, int32_t *tokens, size_t room,
                        size_t *n, size_t *read)
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
    return packed_size(&(kvp_which){ .context = context, .all = true });
}

static size_t get_data(void *context, uint8_t *to, size_t size)
{
    return packed_get(&(kvp_which){ .context = context, .all = true }, to, size);
}

static size_t set_data(void *context, const uint8_t *from, size_t size)
{
    return packed_set(&(kvp_which){ .context = context, .all = true }, from, size);
}

static bool load_file(void *context, const char *path, int32_t *tokens, size_t room, size_t *n)
{
    const kvp_which w = { .context = context, .all = true };
    size_t read;
    bool done;

    if (load_packed(&w, path, tokens, room, n, &read))
        return read > 0;
    kvp_restoring_begin(&w);
    done = kvp_llama.load_file(context, path, tokens, room, n);
    return kvp_restoring_end(&w, path) && done;
}

static bool save_file(void *context, const char *path, const int32_t *tokens, size_t n)
{
    return save(&(kvp_which){ .context = context, .all = true }, path, tokens, n) > 0;
}

static size_t seq_get_size_ext(void *context, int32_t seq, uint32_t flags)
{
    return packed_size(&(kvp_which){ context, false, seq, flags });
}

static size_t seq_get_data_ext(void *context, uint8_t *to, size_t size, int32_t seq, uint32_t flags)
{
    return packed_get(&(kvp_which){ context, false, seq, flags }, to, size);
}

static size_t seq_set_data_ext(void *context, const uint8_t *from, size_t size, int32_t seq,
                               uint32_t flags)
{
    return packed_set(&(kvp_which){ context, false, seq, flags }, from, size);
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
    const kvp_which w = { .context = context, .seq = seq };
    size_t read;

    if (load_packed(&w, path, tokens, room, n, &read))
        return read;
    kvp_restoring_begin(&w);
    read = kvp_llama.seq_load_file(context, path, seq, tokens, room, n);
    return kvp_restoring_end(&w, path) ? read : 0;
}

static size_t seq_save_file(void *context, const char *path, int32_t seq, const int32_t *tokens,
                            size_t n)
{
    return save(&(kvp_which){ .context = context, .seq = seq }, path, tokens, n);
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
        { "llama_state_get_size", &kvp_llama.get_size },
        { "llama_state_get_data", &kvp_llama.get_data },
        { "llama_state_set_data", &kvp_llama.set_data },
        { "llama_state_load_file", &kvp_llama.load_file },
        { "llama_state_save_file", &kvp_llama.save_file },
        { "llama_state_seq_get_size_ext", &kvp_llama.seq_get_size },
        { "llama_state_seq_get_data_ext", &kvp_llama.seq_get_data },
        { "llama_state_seq_set_data_ext", &kvp_llama.seq_set_data },
        { "llama_state_seq_load_file", &kvp_llama.seq_load_file },
        { "llama_state_seq_save_file", &kvp_llama.seq_save_file },
        { "llama_get_memory", &kvp_llama.get_memory },
        { "llama_memory_seq_rm", &kvp_llama.memory_seq_rm },
        { "llama_memory_clear", &kvp_llama.memory_clear },
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
    memcpy(&kvp_llama.memory_seq_pos_max, &address, sizeof(address));
    address = kvant_os_symbol(library, "llama_n_seq_max");
    memcpy(&kvp_llama.n_seq_max, &address, sizeof(address));
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
