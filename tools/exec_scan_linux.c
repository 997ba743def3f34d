/* exec_scan_linux.c - exec_scan.h for Linux.
 *
 * Processes are found by a variable in their environment. A program may leave its parent, its group
 * and its session, but without its environment it would not find the plug-in. */
#define _GNU_SOURCE
#include "exec_scan.h"

#include "os.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Environments are shorter. In a longer one the word may be missed; then a line stays unsaid. */
#define MOST_ENVIRONMENT ((size_t)256 << 10)

/* The beginning of a file of /proc, which has no size; -1 where it cannot be read. */
static ssize_t read_some(const char *path, char *to, size_t bytes)
{
    const int in = open(path, O_RDONLY | O_CLOEXEC);
    size_t n = 0;
    ssize_t got = in >= 0 ? 1 : -1;
    while (got > 0 && n < bytes) {
        got = read(in, to + n, bytes - n);
        n += got > 0 ? (size_t)got : 0;
    }
    if (in >= 0)
        close(in);
    return got < 0 ? -1 : (ssize_t)n;
}

/* text: of MOST_ENVIRONMENT bytes. Variables end with a zero byte each. */
static bool has_word(const char *process, const char *word, char *text)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%.20s/environ", process);
    const ssize_t n = read_some(path, text, MOST_ENVIRONMENT);
    const size_t length = strlen(word) + 1;
    const char *at = n > 0 ? memmem(text, (size_t)n, word, length) : NULL;
    return at != NULL && (at == text || at[-1] == 0);
}

/* Ollama's models have a checksum as a name. */
static bool is_model(const char *path)
{
    const char *ending = strrchr(path, '.');
    return (ending != NULL && strcmp(ending, ".gguf") == 0) ||
           strstr(path, "/blobs/sha256-") != NULL;
}

static void note_model(const char *path, scan *found)
{
    if (found->model[0] == 0)
        snprintf(found->model, sizeof found->model, "%s", kvant_os_file_name(path));
}

static void look_at_maps(const char *process, const char *plugin, scan *found)
{
    char path[64], *line = NULL;
    size_t bytes = 0;
    snprintf(path, sizeof path, "/proc/%.20s/maps", process);
    FILE *maps = fopen(path, "re");
    while (maps != NULL && getline(&line, &bytes, maps) > 0) {
        const char *file = strchr(line, '/');
        if (file == NULL)
            continue;
        line[strcspn(line, "\n")] = 0;
        if (strcmp(file, plugin) == 0)
            found->plugin = true;
        else if (strncmp(kvant_os_file_name(file), "libggml", 7) == 0)
            found->ggml = true;
        else if (is_model(file)) {
            found->mapped = true;
            note_model(file, found);
        }
    }
    free(line);
    if (maps != NULL)
        fclose(maps);
}

/* A model that is read and not mapped. */
static void look_at_files(const char *process, scan *found)
{
    char path[64], target[PATH_MAX];
    snprintf(path, sizeof path, "/proc/%.20s/fd", process);
    DIR *files = opendir(path);
    for (struct dirent *file; files != NULL && (file = readdir(files)) != NULL;) {
        const ssize_t n = readlinkat(dirfd(files), file->d_name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        if (n > 0 && is_model(target))
            note_model(target, found);
    }
    if (files != NULL)
        closedir(files);
}

void scan_processes(const char *word, const char *plugin, scan *found)
{
    char *text = malloc(MOST_ENVIRONMENT);
    DIR *processes = text != NULL ? opendir("/proc") : NULL;
    *found = (scan){ .alive = false };
    for (struct dirent *entry; processes != NULL && (entry = readdir(processes)) != NULL;) {
        if (!isdigit((unsigned char)entry->d_name[0]) || !has_word(entry->d_name, word, text))
            continue;
        found->alive = true;
        look_at_maps(entry->d_name, plugin, found);
        look_at_files(entry->d_name, found);
    }
    if (processes != NULL)
        closedir(processes);
    free(text);
}
