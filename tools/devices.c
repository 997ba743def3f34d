/* devices.c - see devices.h. A line of the list is
 * "  NAME: DESCRIPTION (8192 MiB, 8000 MiB free)". The plug-in adds " [kvant]" or
 * " [kvant, integrated]" to the description of a GPU whose caches it keeps. */
#define _POSIX_C_SOURCE 200809L /* strtok_r */
#include "devices.h"

#include "command.h"
#include "os.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A program on a GPU that sleeps needs about 2 seconds. A script that ignores the option and starts
 * a server would run until this limit. */
#define MAX_SECONDS 10
#define LIST_BYTES 16384

/* The variables of `env NAME=value` before the program, which are the program's. Returns how
 * many. */
static int variables_before(const program *p, char **variables)
{
    int n = 0;
    for (int i = 1; i < p->n_before; i++)
        if (strchr(p->before[i], '=') != NULL && p->before[i][0] != '-')
            variables[n++] = p->before[i];
    return n;
}

void devices_query(const program *p, device_list *list)
{
    static char option[] = "--list-devices";
    const bool sub = program_has_command(p);
    char *words[] = { p->argv[0], sub ? p->argv[1] : option, sub ? option : NULL, NULL };
    char text[LIST_BYTES + 1], **variables = calloc((size_t)p->n_before + 1, sizeof *variables);
    bool late = false;
    *list = (device_list){ .known = false };
    if (variables != NULL && os_read_output(words, variables, variables_before(p, variables),
                                            MAX_SECONDS, text, sizeof text, &late))
        devices_read(text, list);
    free(variables);
    if (late)
        complain("exec: %s --list-devices gave no list within %d seconds",
                 kvant_os_file_name(p->argv[0]), MAX_SECONDS);
}

static bool opens(const char *name)
{
    void *library = kvant_os_open_library(name);
    if (library != NULL)
        kvant_os_close_library(library);
    return library != NULL;
}

bool devices_of_other_kinds(void)
{
    static const char *const names[] = { OS_GPU_LIBRARIES };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (opens(names[i]))
            return !opens(KVANT_OS_CUDA_DRIVER);
    return false;
}

static bool cut_end(char *text, const char *end)
{
    const size_t n = strlen(text), bytes = strlen(end);
    if (n < bytes || strcmp(text + n - bytes, end) != 0)
        return false;
    text[n - bytes] = 0;
    return true;
}

/* One line as a device; false when the line is none. */
static bool read_device(char *line, device *d)
{
    char *colon = strstr(line, ": "), *memory = strrchr(line, '(');
    unsigned long long total, available;
    *d = (device){ .free_mib = 0 };
    line += strspn(line, " ");
    if (colon == NULL || colon <= line || (size_t)(colon - line) >= sizeof d->name)
        return false;
    if (memory != NULL && sscanf(memory, "(%llu MiB, %llu MiB free)", &total, &available) == 2) {
        d->free_mib = available;
        *memory = 0;
    }
    *colon = 0;
    snprintf(d->name, sizeof d->name, "%s", line);
    snprintf(d->description, sizeof d->description, "%s", colon + 2);
    while (cut_end(d->description, " "))
        ;
    d->is_integrated = cut_end(d->description, " [kvant, integrated]");
    d->keeps_caches = d->is_integrated || cut_end(d->description, " [kvant]");
    return true;
}

static bool has_number(const char *name, const char *word)
{
    const size_t n = strlen(word);
    return strncmp(name, word, n) == 0 && isdigit((unsigned char)name[n]);
}

/* Devices that hold no weights: KVANT itself, KVANT_ACCEL, and libraries of matrix products. */
static bool is_no_gpu(const char *name)
{
    static const char *const names[] = { "BLAS", "ZenDNN", "KVANT", "KVANT_ACCEL" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

/* Another back end lists CUDA's cards as well: the same card by another name. */
static bool is_cuda_card(const device_list *list, const device *d)
{
    for (size_t i = 0; i < list->n_gpus; i++)
        if (strcmp(list->gpus[i].description, d->description) == 0)
            return true;
    return has_number(d->name, "CUDA") && list->n_gpus > 0;
}

/* Leaves out GPUs that llama.cpp leaves out. */
static void remove_integrated(device_list *list)
{
    size_t n = 0;
    for (size_t i = 0; i < list->n_others; i++)
        if (!list->others[i].is_integrated)
            list->others[n++] = list->others[i];
    list->n_others = n > 0 ? n : list->n_others;
}

void devices_read(char *text, device_list *list)
{
    device all[2 * MAX_DEVICES];
    size_t n = 0;
    char *line = strstr(text, "Available devices:\n"), *rest;
    *list = (device_list){ .known = line != NULL };
    if (line == NULL)
        return;
    for (line = strtok_r(line, "\n", &rest); line != NULL && n < 2 * MAX_DEVICES;
         line = strtok_r(NULL, "\n", &rest)) {
        n += read_device(line, &all[n]);
    }
    for (size_t i = 0; i < n; i++) {
        list->has_kvant = list->has_kvant || strncmp(all[i].name, "KVANT", 5) == 0;
        list->has_cuda = list->has_cuda || has_number(all[i].name, "CUDA");
        if (has_number(all[i].name, "KVANT") && list->n_gpus < MAX_DEVICES)
            list->gpus[list->n_gpus++] = all[i];
    }
    for (size_t i = 0; i < n; i++) {
        const bool own = has_number(all[i].name, "KVANT") || is_no_gpu(all[i].name);
        /* A list without the plug-in's devices does not tell whether kvant works on CUDA's. */
        const bool cuda =
            list->has_kvant ? is_cuda_card(list, &all[i]) : has_number(all[i].name, "CUDA");
        if (!own && !cuda && list->n_others < MAX_DEVICES)
            list->others[list->n_others++] = all[i];
    }
    remove_integrated(list);
}
