/* gguf_file.c - see gguf_file.h. */
#include "gguf_file.h"

#include "../integrations/llama.cpp/gguf.h"
#include "os.h"

#include <stdio.h>
#include <string.h>

/* Looks for a key from the file's beginning on, and reads its value. */
static bool find(FILE *file, uint64_t bytes, const char *key, gguf_value *value)
{
    char name[GGUF_TEXT];
    gguf_reader r;
    bool ok = gguf_begin(&r, file, bytes), found = false;
    while (ok && !found) {
        ok = gguf_take_name(&r, name) && gguf_take_value(&r, value);
        found = ok && strcmp(name, key) == 0;
    }
    return found;
}

static uint64_t file_bytes(const char *path)
{
    uint64_t bytes = 0;
    int file;
    if (!kvant_os_open(path, &file))
        return 0;
    const bool known = kvant_os_size(file, &bytes);
    kvant_os_close(file);
    return known ? bytes : 0;
}

uint64_t gguf_bytes(const char *path)
{
    static const char ending[] = "-00001-of-00000.gguf";
    const size_t length = strlen(path), n = sizeof ending - 1;
    unsigned parts = 0;
    char part[OS_MAX_PATH];
    if (length < n || strncmp(path + length - n, ending, 10) != 0 ||
        sscanf(path + length - n + 10, "%5u.gguf", &parts) != 1)
        return file_bytes(path);
    uint64_t bytes = 0;
    for (unsigned i = 1; i <= parts; i++) {
        const int stem = (int)(length - n);
        if (snprintf(part, sizeof part, "%.*s-%05u-of-%05u.gguf", stem, path, i, parts) <
            (int)sizeof part)
            bytes += file_bytes(part);
    }
    return bytes;
}

bool gguf_read_size(const char *path, gguf_size *size)
{
    char key[GGUF_TEXT + 16];
    gguf_value value;
    const uint64_t bytes = file_bytes(path);
    FILE *file = bytes > 0 ? fopen(path, "rb") : NULL;
    if (file == NULL)
        return false;
    bool ok = find(file, bytes, "general.architecture", &value);
    if (ok) {
        snprintf(key, sizeof key, "%s.block_count", value.text);
        ok = find(file, bytes, key, &value) && value.number > 0 && value.number <= GGUF_MAX_LAYERS;
    }
    fclose(file);
    *size = (gguf_size){ .n_layers = value.number, .bytes = ok ? gguf_bytes(path) : 0 };
    return ok;
}
