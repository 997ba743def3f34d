/* program.c - see program.h. It reads options as llama.cpp's common/arg.cpp and llama-bench do. */
#include "program.h"

#include "os.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_llama(const char *word)
{
    return strncmp(kvant_os_file_name(word), "llama", 5) == 0;
}

/* Whether the file begins as programs do: on a mounted Windows disk models are executable, too. */
static bool is_program(const char *word)
{
    char path[OS_MAX_PATH], magic[4] = "";
    const char *ending = strrchr(word, '.');
    if ((ending != NULL && strcmp(ending, ".py") == 0) || !os_find_program(word, path, sizeof path))
        return false;
    FILE *file = fopen(path, "rb");
    const size_t n = file != NULL ? fread(magic, 1, sizeof magic, file) : 0;
    if (file != NULL)
        fclose(file);
    return n == sizeof magic && os_is_program(magic, true);
}

static bool has_text(const char *block, size_t n, const char *text, size_t length)
{
    for (const char *at = block; n >= length; at++) {
        const char *next = memchr(at, text[0], n - length + 1);
        if (next == NULL)
            return false;
        if (memcmp(next, text, length) == 0)
            return true;
        n -= (size_t)(next + 1 - at);
        at = next;
    }
    return false;
}

/* The text of an error of ggml.c's, which a stripped file has, too. */
bool program_has_ggml(const char *path)
{
    static const char text[] = "not enough space in the context's memory pool"; /* of ggml.c */
    enum { BLOCK = 1 << 20, MOST_BLOCKS = 64, KEPT = sizeof text };
    char *block = malloc(KEPT + BLOCK);
    FILE *file = block != NULL ? fopen(path, "rb") : NULL;
    bool found = false;
    size_t kept = 0, n = 1; /* the text may begin in one block and end in the next one */
    for (int i = 0; file != NULL && i < MOST_BLOCKS && n > 0 && !found; i++) {
        n = fread(block + kept, 1, BLOCK, file);
        if (i == 0 && (n < 4 || !os_is_program(block, false)))
            break;
        found = has_text(block, kept + n, text, sizeof text - 1);
        const size_t all = kept + n;
        kept = all < KEPT ? all : KEPT;
        memmove(block, block + all - kept, kept);
    }
    if (file != NULL)
        fclose(file);
    free(block);
    return found;
}

bool program_find(int argc, char **argv, program *found)
{
    int at = 0;
    if (!is_llama(argv[0]))
        for (at = 1; at < argc && !(is_llama(argv[at]) && is_program(argv[at]));)
            at++;
    const bool ok = at < argc;
    at = ok ? at : 0;
    *found = (program){ .argc = argc - at, .argv = argv + at, .n_before = at, .before = argv };
    return ok;
}

/* llama.cpp takes --cache_type_k for --cache-type-k. */
static bool is_spelling(const char *word, const char *name)
{
    if (strncmp(name, "--", 2) != 0)
        return strcmp(word, name) == 0;
    for (; *word == *name || (*word == '_' && *name == '-'); word++, name++)
        if (*name == 0)
            return true;
    return false;
}

static bool is_one_of(const char *word, const char *const *names)
{
    while (*names != NULL && !is_spelling(word, *names))
        names++;
    return *names != NULL;
}

bool program_word_is(const char *word, const program_option *option)
{
    return is_one_of(word, option->names);
}

/* The program's variable: `env NAME=value` before the program stands above kvant's environment. */
static const char *variable(const program *p, const char *name)
{
    const size_t n = strlen(name);
    for (int i = p->n_before - 1; i > 0; i--)
        if (strncmp(p->before[i], name, n) == 0 && p->before[i][n] == '=')
            return p->before[i] + n + 1;
    return getenv(name);
}

const char *program_value(const program *p, const program_option *option, const char **name)
{
    const char *value = NULL, *from = NULL;
    for (int i = 1; i < p->argc; i++)
        if (is_one_of(p->argv[i], option->names)) {
            from = p->argv[i];
            value = i + 1 < p->argc ? p->argv[i + 1] : "";
        }
    for (size_t i = 0; value == NULL && option->variables[i] != NULL; i++) {
        from = option->variables[i];
        value = variable(p, from);
        value = value != NULL && value[0] != 0 ? value : NULL;
    }
    if (name != NULL && value != NULL)
        *name = from;
    return value;
}

bool program_is_off(const char *value)
{
    static const char *const words[] = { "off", "0", "false", "disabled" };
    for (size_t i = 0; value != NULL && i < sizeof words / sizeof *words; i++)
        if (strcmp(value, words[i]) == 0)
            return true;
    return false;
}

bool program_has_command(const program *p)
{
    return p->argc > 1 && strcmp(kvant_os_file_name(p->argv[0]), "llama") == 0 &&
           p->argv[1][0] != '-';
}

bool program_is_bench(const program *p)
{
    return strncmp(kvant_os_file_name(p->argv[0]), "llama-bench", 11) == 0 ||
           (program_has_command(p) && strcmp(p->argv[1], "bench") == 0);
}

bool program_keeps_cache(const program *p)
{
    static const program_option no = { { "-nkvo", "--no-kv-offload", NULL }, { NULL } };
    static const char *const yes[] = { "-kvo", "--kv-offload", NULL };
    if (program_is_bench(p)) { /* its -nkvo has a value, and it reads no variables */
        const char *value = program_value(p, &no, NULL);
        return value != NULL && !program_is_off(value);
    }
    bool given = false, keeps = false;
    for (int i = 1; i < p->argc; i++)
        if (is_one_of(p->argv[i], no.names) || is_one_of(p->argv[i], yes)) {
            given = true;
            keeps = is_one_of(p->argv[i], no.names);
        }
    return given ? keeps
                 : variable(p, "LLAMA_ARG_NO_KV_OFFLOAD") != NULL ||
                       program_is_off(variable(p, "LLAMA_ARG_KV_OFFLOAD"));
}

bool program_only_prints(const program *p)
{
    static const char *const words[] = { "-h",        "--help",       "--usage",        "--version",
                                         "--license", "--cache-list", "--list-devices", NULL };
    for (int i = 1; i < p->argc; i++)
        if (is_one_of(p->argv[i], words))
            return true;
    return false;
}
