/* devices.h - the devices that a llama.cpp program lists, with the plug-in loaded. */
#pragma once

#include "program.h"

#include <stdint.h>

typedef struct device {
    char name[64];
    char description[128];
    uint64_t free_mib;  /* 0: not known */
    bool keeps_caches;  /* the plug-in keeps its caches in the computer's memory */
    bool is_integrated; /* llama.cpp uses it only without another GPU */
} device;

enum { MAX_DEVICES = 16 };
typedef struct device_list {
    bool known;     /* false: the program lists none, as scripts and programs without devices do */
    bool has_kvant; /* the plug-in's devices are listed; a program can load it later */
    bool has_cuda;  /* CUDA's own devices are listed */
    size_t n_others, n_gpus;
    device others[MAX_DEVICES]; /* GPUs that kvant does not work on: Vulkan0, ROCm0, Metal, ... */
    device gpus[MAX_DEVICES];   /* kvant's own on GPUs: KVANT0, KVANT1, ... */
} device_list;

/* Runs `PROGRAM --list-devices` with this process's environment, for at most 10 seconds. */
void devices_query(const program *p, device_list *list);

/* Whether programs of this machine can use GPUs, but none of CUDA's. */
bool devices_of_other_kinds(void);

/* Sorts the text of such a list. Text of another kind gives a list that is not known. */
void devices_read(char *text, device_list *list);
