/* A stand-in for NVIDIA's management library: the symbols that the agent calls, answered from a text file.
 *
 * The file named by STANDIN_NVML_STATE holds `key=value` for every GPU, `<gpu>.key=value` for one. It is checked on
 * each call (read again when another file stands under its name), so that a test changes the machine while the agent
 * runs: write it by rename. Keys:
 *
 *   count, driver                   of the machine; init=<code> makes nvmlInit fail
 *   <symbol without nvmlDevice>     what that call answers, in NVML's own unit: PowerUsage=350000
 *   field.<id>[.<link>]             a field value; absent: NOT_SUPPORTED; a leading @ is a return code: @3
 *   gpm.<id>                        a GPM metric; absent: its own return code says NOT_SUPPORTED
 *   error.<symbol>=<code>           that call fails; `lost=1`: every call on the GPU answers GPU_IS_LOST
 *   hang=1                          calls on the GPU do not return until it is cleared; delay_ms: they return late
 *   event_seq, event_type, event_data   an event, delivered once for each increase of event_seq; event_gpu_instance,
 *       event_compute_instance where it is of a MIG instance
 *   mig.<index>=<gpu instance>:<compute instance>:<profile>   a MIG device; its own keys stand behind mig.<index>:
 *       MemoryInfo.total, MemoryInfo.used, processes, error.<symbol>; gpm.mig.<gpu instance>.<id> is a GPM metric
 *
 * Layouts are those of nvml.h as nvidia-ml-py declares them (structures carry a version that is checked).
 * Leave a symbol out, as an old driver does: -D<symbol>=absent_<symbol>.
 */
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       TIMEOUT = 10, GPU_IS_LOST = 15, VERSION_MISMATCH = 25 };
enum { MAX_GPUS = 64, MAX_ENTRIES = 8192, TEXT_BYTES = 1 << 18 };

typedef struct { const char *key, *value; } entry_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char text[TEXT_BYTES];
static entry_t entries[MAX_ENTRIES];
static int num_entries;
static unsigned generation; /* grows when the file was read again */
static struct stat known;
static int initialised; /* nvmlInit less nvmlShutdown */

static int by_key(const void *a, const void *b) {
    return strcmp(((const entry_t *)a)->key, ((const entry_t *)b)->key);
}

static void reread(void) {
    const char *path = getenv("STANDIN_NVML_STATE");
    struct stat now;
    if (path == NULL || stat(path, &now) != 0) { num_entries = 0; known.st_ino = 0; return; }
    if (now.st_ino == known.st_ino && now.st_size == known.st_size &&
        now.st_mtim.tv_sec == known.st_mtim.tv_sec && now.st_mtim.tv_nsec == known.st_mtim.tv_nsec) return;
    FILE *f = fopen(path, "r");
    if (f == NULL) return;
    size_t n = fread(text, 1, TEXT_BYTES - 1, f);
    fclose(f);
    text[n] = 0;
    known = now;
    generation++;
    num_entries = 0;
    char *rest = text, *line;
    while ((line = strsep(&rest, "\n")) != NULL && num_entries < MAX_ENTRIES) {
        char *equals = strchr(line, '=');
        if (equals == NULL) continue;
        *equals = 0;
        entries[num_entries++] = (entry_t){line, equals + 1};
    }
    qsort(entries, num_entries, sizeof(entry_t), by_key);
}

/* The value under `key` of GPU `gpu` (-1: of the machine), copied into `out`. 0: there is none. */
static int find(int gpu, const char *key, char *out, size_t size) {
    char own[160];
    int found = 0;
    pthread_mutex_lock(&lock);
    reread();
    snprintf(own, sizeof own, "%d.%s", gpu, key);
    entry_t wanted = {own, NULL};
    entry_t *e = gpu < 0 ? NULL : bsearch(&wanted, entries, num_entries, sizeof(entry_t), by_key);
    if (e == NULL) {
        wanted.key = key;
        e = bsearch(&wanted, entries, num_entries, sizeof(entry_t), by_key);
    }
    if (e != NULL) {
        snprintf(out, size, "%s", e->value);
        found = 1;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static unsigned long long number(int gpu, const char *key, unsigned long long otherwise) {
    char v[128];
    return find(gpu, key, v, sizeof v) ? strtoull(v, NULL, 0) : otherwise;
}

enum { WAIT_STEP_MS = 25 };

static void sleep_ms(unsigned ms) {
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000L};
    nanosleep(&t, NULL);
}

static int gpu_of(void *device) { return ((int)(intptr_t)device & 0xffff) - 1; }
static int mig_of(void *device) { return ((int)(intptr_t)device >> 16) - 1; } /* -1: the whole GPU */

/* What every call on a device does first: 0, or the code that it fails with. */
static int enter(int gpu, const char *symbol) {
    char key[160];
    if (initialised <= 0) return UNINITIALIZED;
    if (gpu < 0 || gpu >= (int)number(-1, "count", 1)) return INVALID_ARGUMENT;
    while (number(gpu, "hang", 0)) sleep_ms(5);
    unsigned delay_ms = (unsigned)number(gpu, "delay_ms", 0);
    if (delay_ms) sleep_ms(delay_ms);
    if (number(gpu, "lost", 0)) return GPU_IS_LOST;
    snprintf(key, sizeof key, "error.%s", symbol);
    return (int)number(gpu, key, OK);
}

#define ENTER(device) do { int failed = enter(gpu_of(device), __func__); if (failed) return failed; } while (0)

/* ---- the library and its devices */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int failed = (int)number(-1, "init", OK);
    if (failed) return failed;
    initialised++;
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
    if (initialised <= 0) return UNINITIALIZED;
    initialised--;
    return OK;
}
const char *nvmlErrorString(int code) { return code == 999 ? "Unknown Error" : "an error of the stand-in"; }

static int text_of(int gpu, const char *key, const char *otherwise, char *out, unsigned size) {
    if (!find(gpu, key, out, size)) snprintf(out, size, "%s", otherwise);
    return OK;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) { return text_of(-1, "driver", "575.57.08", out, size); }

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (initialised <= 0) return UNINITIALIZED;
    int failed = (int)number(-1, "error.nvmlDeviceGetCount_v2", OK);
    if (failed) return failed;
    *count = (unsigned)number(-1, "count", 1);
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    int failed = enter((int)index, __func__);
    if (failed) return failed;
    *device = (void *)(intptr_t)(index + 1);
    return OK;
}

static int uuid_of(int gpu, char *out, unsigned size) {
    char otherwise[64];
    snprintf(otherwise, sizeof otherwise, "GPU-00000000-0000-0000-0000-%012d", gpu);
    return text_of(gpu, "UUID", otherwise, out, size);
}
int nvmlDeviceGetUUID(void *device, char *out, unsigned size) {
    ENTER(device);
    if (mig_of(device) >= 0) {
        snprintf(out, size, "MIG-00000000-0000-0000-%04d-%012d", gpu_of(device), mig_of(device));
        return OK;
    }
    return uuid_of(gpu_of(device), out, size);
}

/* What is said of a MIG device under `mig.<index>` or `mig.<index>.<rest>`. 0: nothing. */
static int find_mig(void *device, const char *rest, char *out, size_t size) {
    char key[160];
    snprintf(key, sizeof key, rest[0] ? "mig.%d.%s" : "mig.%d", mig_of(device), rest);
    return find(gpu_of(device), key, out, size);
}
static unsigned long long mig_number(void *device, const char *rest, unsigned long long otherwise) {
    char v[128];
    return find_mig(device, rest, v, sizeof v) ? strtoull(v, NULL, 0) : otherwise;
}
/* 0, or the code that a call on this MIG device fails with. */
static int enter_mig(void *device, const char *symbol) {
    char key[160], v[128];
    snprintf(key, sizeof key, "error.%s", symbol);
    if (mig_of(device) < 0) return INVALID_ARGUMENT;
    if (!find_mig(device, "", v, sizeof v)) return NOT_FOUND;
    return (int)mig_number(device, key, OK);
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *out) {
    ENTER(device);
    *out = (unsigned)number(gpu_of(device), "MaxMigDeviceCount", 7);
    return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **out) {
    ENTER(device);
    *out = (void *)((intptr_t)device | (intptr_t)(index + 1) << 16);
    return enter_mig(*out, __func__);
}
static int mig_id(void *device, const char *symbol, int which, unsigned *out) {
    char v[128];
    unsigned ids[2] = {0, 0};
    int failed = enter_mig(device, symbol);
    if (failed) return failed;
    find_mig(device, "", v, sizeof v);
    sscanf(v, "%u:%u", &ids[0], &ids[1]);
    *out = ids[which];
    return OK;
}
int nvmlDeviceGetGpuInstanceId(void *device, unsigned *out) { return mig_id(device, __func__, 0, out); }
int nvmlDeviceGetComputeInstanceId(void *device, unsigned *out) { return mig_id(device, __func__, 1, out); }

int nvmlDeviceGetName(void *device, char *out, unsigned size) {
    ENTER(device);
    if (mig_of(device) >= 0) {
        char v[128], own[128];
        int failed = enter_mig(device, __func__);
        if (failed) return failed;
        find_mig(device, "", v, sizeof v);
        const char *profile = strrchr(v, ':');
        text_of(gpu_of(device), "Name", "NVIDIA Stand-in", own, sizeof own);
        if ((unsigned)snprintf(out, size, "%s MIG %s", own, profile == NULL ? "" : profile + 1) >= size)
            return INSUFFICIENT_SIZE;
        return OK;
    }
    return text_of(gpu_of(device), "Name", "NVIDIA Stand-in", out, size);
}
int nvmlDeviceGetMinorNumber(void *device, unsigned *out) {
    ENTER(device);
    *out = (unsigned)number(gpu_of(device), "MinorNumber", gpu_of(device));
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (initialised <= 0) return UNINITIALIZED;
    for (int gpu = 0; gpu < (int)number(-1, "count", 1); gpu++) {
        char own[96];
        uuid_of(gpu, own, sizeof own);
        if (strcmp(own, uuid) == 0) return nvmlDeviceGetHandleByIndex_v2((unsigned)gpu, device);
    }
    return NOT_FOUND;
}

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} pci_t;
int nvmlDeviceGetPciInfo_v3(void *device, pci_t *out) {
    ENTER(device);
    memset(out, 0, sizeof *out);
    out->bus = 0x10 + 0x0a * gpu_of(device);
    snprintf(out->busId, sizeof out->busId, "%08X:%02X:00.0", 0, out->bus);
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:00.0", 0, out->bus);
    return OK;
}

/* ---- plain numbers: absent in the file means NOT_SUPPORTED */

static int plain(void *device, const char *symbol, const char *key, unsigned long long *out) {
    char v[64];
    int failed = enter(gpu_of(device), symbol);
    if (failed) return failed;
    if (mig_of(device) >= 0) return NOT_SUPPORTED;
    if (!find(gpu_of(device), key, v, sizeof v)) return NOT_SUPPORTED;
    *out = strtoull(v, NULL, 0);
    return OK;
}
#define PLAIN(name, type)                                                      \
    int nvmlDeviceGet##name(void *device, type *out) {                         \
        unsigned long long v = 0;                                              \
        int failed = plain(device, __func__, #name, &v);                       \
        if (failed == OK) *out = (type)v;                                      \
        return failed;                                                         \
    }
PLAIN(PowerUsage, unsigned)
PLAIN(EnforcedPowerLimit, unsigned)
PLAIN(TotalEnergyConsumption, unsigned long long)
PLAIN(CurrentClocksEventReasons, unsigned long long)
PLAIN(CurrentClocksThrottleReasons, unsigned long long)
PLAIN(PcieReplayCounter, unsigned)
PLAIN(CurrPcieLinkGeneration, unsigned)
PLAIN(CurrPcieLinkWidth, unsigned)
PLAIN(MaxPcieLinkGeneration, unsigned)
PLAIN(MaxPcieLinkWidth, unsigned)

int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *out) {
    unsigned long long v = 0;
    (void)sensor;
    int failed = plain(device, __func__, "Temperature", &v);
    if (failed == OK) *out = (unsigned)v;
    return failed;
}
typedef struct { unsigned version, sensorType; int temperature; } temperature_t;
int nvmlDeviceGetTemperatureV(void *device, temperature_t *io) {
    unsigned long long v = 0;
    if (io->version != 0x100000C) return VERSION_MISMATCH;
    int failed = plain(device, __func__, "Temperature", &v);
    if (failed == OK) io->temperature = (int)v;
    return failed;
}
int nvmlDeviceGetClockInfo(void *device, unsigned which, unsigned *out) {
    unsigned long long v = 0;
    int failed = plain(device, __func__, which == 1 ? "ClockInfo.sm" : which == 2 ? "ClockInfo.mem" : "ClockInfo", &v);
    if (failed == OK) *out = (unsigned)v;
    return failed;
}
int nvmlDeviceGetMaxClockInfo(void *device, unsigned which, unsigned *out) {
    unsigned long long v = 0;
    int failed = plain(device, __func__, which == 1 ? "MaxClockInfo.sm" : "MaxClockInfo", &v);
    if (failed == OK) *out = (unsigned)v;
    return failed;
}
static int coder(void *device, const char *symbol, const char *key, unsigned *out, unsigned *period_us) {
    unsigned long long v = 0;
    int failed = plain(device, symbol, key, &v);
    if (failed == OK) { *out = (unsigned)v; *period_us = 1000000; }
    return failed;
}
int nvmlDeviceGetEncoderUtilization(void *device, unsigned *out, unsigned *us) {
    return coder(device, __func__, "EncoderUtilization", out, us);
}
int nvmlDeviceGetDecoderUtilization(void *device, unsigned *out, unsigned *us) {
    return coder(device, __func__, "DecoderUtilization", out, us);
}
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    unsigned long long v = 0;
    int failed = plain(device, __func__, "MigMode", &v);
    if (failed == OK) *current = *pending = (unsigned)v;
    return failed;
}
int nvmlDeviceGetTotalEccErrors(void *device, unsigned type, unsigned counter, unsigned long long *out) {
    char key[32];
    snprintf(key, sizeof key, "TotalEccErrors.%u.%u", type, counter);
    return plain(device, __func__, key, out);
}

/* ---- structures */

typedef struct { unsigned gpu, memory; } utilization_t;
int nvmlDeviceGetUtilizationRates(void *device, utilization_t *out) {
    unsigned long long v = 0;
    int failed = plain(device, __func__, "UtilizationRates", &v);
    if (failed) return failed;
    out->gpu = (unsigned)v;
    out->memory = (unsigned)number(gpu_of(device), "UtilizationRates.memory", 0);
    return OK;
}

typedef struct { unsigned long long total, free, used; } memory_t;
int nvmlDeviceGetMemoryInfo(void *device, memory_t *out) {
    ENTER(device);
    if (mig_of(device) >= 0) {
        int failed = enter_mig(device, __func__);
        if (failed) return failed;
        out->total = mig_number(device, "MemoryInfo.total", 0);
        out->used = mig_number(device, "MemoryInfo.used", 0);
        out->free = out->total - out->used;
        return OK;
    }
    out->total = number(gpu_of(device), "MemoryInfo.total", 0);
    out->used = number(gpu_of(device), "MemoryInfo.used", 0) + number(gpu_of(device), "MemoryInfo.reserved", 0);
    out->free = out->total - out->used;
    return OK;
}
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2_t *out) {
    if (out->version != 0x02000028) return VERSION_MISMATCH;
    ENTER(device);
    out->total = number(gpu_of(device), "MemoryInfo.total", 0);
    out->used = number(gpu_of(device), "MemoryInfo.used", 0);
    out->reserved = number(gpu_of(device), "MemoryInfo.reserved", 0);
    out->free = out->total - out->used - out->reserved;
    return OK;
}

int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failure) {
    unsigned long long v = 0;
    int failed = plain(device, __func__, "RemappedRows.corrected", &v);
    if (failed) return failed;
    *corrected = (unsigned)v;
    *uncorrected = (unsigned)number(gpu_of(device), "RemappedRows.uncorrected", 0);
    *pending = (unsigned)number(gpu_of(device), "RemappedRows.pending", 0);
    *failure = (unsigned)number(gpu_of(device), "RemappedRows.failure", 0);
    return OK;
}

typedef struct {
    unsigned version;
    unsigned long long aggregateUncParity, aggregateUncSecDed, aggregateCor, volatileUncParity, volatileUncSecDed,
        volatileCor, buckets[5];
    unsigned thresholdExceeded;
} sram_t;
int nvmlDeviceGetSramEccErrorStatus(void *device, sram_t *out) {
    unsigned long long v = 0;
    if (out->version != 0x1000068) return VERSION_MISMATCH;
    int failed = plain(device, __func__, "SramEccErrorStatus.threshold", &v);
    if (failed) return failed;
    out->thresholdExceeded = (unsigned)v;
    return OK;
}

typedef struct {
    unsigned version;
    unsigned char clusterUuid[16];
    int status;
    unsigned cliqueId;
    unsigned char state;
    unsigned healthMask;
    unsigned char healthSummary;
} fabric_t;
int nvmlDeviceGetGpuFabricInfoV(void *device, fabric_t *out) {
    unsigned long long v = 0;
    int is_v3 = number(gpu_of(device), "GpuFabricInfoV.newest", 3) >= 3;
    if (out->version != 0x2000024 && !(is_v3 && out->version == 0x3000028)) return VERSION_MISMATCH;
    int failed = plain(device, __func__, "GpuFabricInfoV.state", &v);
    if (failed) return failed;
    out->state = (unsigned char)v;
    out->status = (int)number(gpu_of(device), "GpuFabricInfoV.status", OK);
    out->healthMask = (unsigned)number(gpu_of(device), "GpuFabricInfoV.healthMask", 0);
    if (out->version == 0x3000028) out->healthSummary = 1;
    return OK;
}

typedef struct { unsigned pid; unsigned long long usedGpuMemory; unsigned gpuInstanceId, computeInstanceId; } process_t;
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *out) {
    char v[4096]; /* `<pid>:<bytes>,<pid>:<bytes>` */
    process_t found[256];
    unsigned n = 0;
    ENTER(device);
    if (mig_of(device) < 0 ? find(gpu_of(device), "processes", v, sizeof v) : find_mig(device, "processes", v, sizeof v)) {
        char *rest = v, *one;
        while ((one = strsep(&rest, ",")) != NULL && n < 256) {
            unsigned pid;
            unsigned long long bytes;
            if (sscanf(one, "%u:%llu", &pid, &bytes) == 2) found[n++] = (process_t){pid, bytes, ~0u, ~0u};
        }
    }
    unsigned room = *count;
    *count = n;
    if (n > room) return INSUFFICIENT_SIZE;
    if (n) memcpy(out, found, n * sizeof *found);
    return OK;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) {
    char key[64];
    unsigned long long v = 0;
    if (link >= number(gpu_of(device), "field.91", 0)) return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "NvLinkState.%u", link);
    int failed = enter(gpu_of(device), __func__);
    if (failed) return failed;
    v = number(gpu_of(device), key, 1);
    *active = (unsigned)v;
    return OK;
}
int nvmlDeviceGetNvLinkErrorCounter(void *device, unsigned link, unsigned counter, unsigned long long *out) {
    char key[64];
    ENTER(device);
    if (!number(gpu_of(device), "NvLinkErrorCounter", 0)) return NOT_SUPPORTED;
    snprintf(key, sizeof key, "NvLinkErrorCounter.%u.%u", link, counter);
    *out = number(gpu_of(device), key, 0);
    return OK;
}

typedef union { double d; unsigned u; unsigned long ul; unsigned long long ull; long long sll; } value_t;
typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned valueType;
    int nvmlReturn;
    value_t value;
} field_t;
int nvmlDeviceGetFieldValues(void *device, int count, field_t *fields) {
    ENTER(device);
    int gpu = gpu_of(device);
    for (int i = 0; i < count; i++) {
        char key[64], v[64];
        field_t *f = &fields[i];
        snprintf(key, sizeof key, "field.%u.%u", f->fieldId, f->scopeId);
        int found = find(gpu, key, v, sizeof v);
        if (!found) {
            snprintf(key, sizeof key, "field.%u", f->fieldId);
            found = find(gpu, key, v, sizeof v);
        }
        f->timestamp = 1;
        f->valueType = 3;
        f->value.ull = 0;
        f->nvmlReturn = !found ? NOT_SUPPORTED : v[0] == '@' ? atoi(v + 1) : OK;
        if (f->nvmlReturn != OK) continue;
        if (v[0] == '-') { f->valueType = 4; f->value.sll = strtoll(v, NULL, 0); }
        else if (strchr(v, '.')) { f->valueType = 0; f->value.d = strtod(v, NULL); }
        else if (f->fieldId == 82 || f->fieldId == 230) { f->valueType = 1; f->value.u = (unsigned)strtoul(v, NULL, 0); }
        else f->value.ull = strtoull(v, NULL, 0);
    }
    return OK;
}

/* ---- GPM: a sample is the number of polls so far; metrics need two different ones */

typedef struct { int gpu, gpu_instance; unsigned long long taken; } sample_t;
typedef struct { unsigned metricId; int nvmlReturn; double value; const char *names[3]; } gpm_metric_t;
typedef struct { unsigned version, numMetrics; sample_t *sample1, *sample2; gpm_metric_t metrics[]; } gpm_get_t;
typedef struct { unsigned version, isSupportedDevice; } gpm_support_t;

int nvmlGpmQueryDeviceSupport(void *device, gpm_support_t *out) {
    if (out->version != 1) return VERSION_MISMATCH;
    ENTER(device);
    out->isSupportedDevice = (unsigned)number(gpu_of(device), "gpm", 0);
    return OK;
}
int nvmlGpmSampleAlloc(sample_t **out) { *out = calloc(1, sizeof **out); return OK; }
int nvmlGpmSampleFree(sample_t *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(void *device, sample_t *out) {
    static unsigned long long polls;
    ENTER(device);
    out->gpu = gpu_of(device);
    out->gpu_instance = -1;
    out->taken = __atomic_add_fetch(&polls, 1, __ATOMIC_RELAXED);
    return OK;
}
int nvmlGpmMigSampleGet(void *device, unsigned gpu_instance, sample_t *out) {
    static unsigned long long polls;
    ENTER(device);
    out->gpu = gpu_of(device);
    out->gpu_instance = (int)gpu_instance;
    out->taken = __atomic_add_fetch(&polls, 1, __ATOMIC_RELAXED);
    return OK;
}
int nvmlGpmMetricsGet(gpm_get_t *io) {
    if (io->version != 1) return VERSION_MISMATCH;
    int gpu_instance = io->sample1->gpu_instance;
    if (gpu_instance != io->sample2->gpu_instance) return INVALID_ARGUMENT;
    if (io->sample1->gpu != io->sample2->gpu || io->sample1->taken >= io->sample2->taken) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < io->numMetrics; i++) {
        char key[64], v[64];
        gpm_metric_t *m = &io->metrics[i];
        if (gpu_instance < 0) snprintf(key, sizeof key, "gpm.%u", m->metricId);
        else snprintf(key, sizeof key, "gpm.mig.%d.%u", gpu_instance, m->metricId);
        m->nvmlReturn = find(io->sample1->gpu, key, v, sizeof v) ? OK : NOT_SUPPORTED;
        m->value = m->nvmlReturn == OK ? strtod(v, NULL) : -1e9; /* a value that no reader may take for real */
    }
    return OK;
}

/* ---- events */

/* `changes`: an inotify descriptor that tells of another file under the state's name. The real library sleeps in the
 * kernel until the driver wakes it; so does this one, lest a waiting process pay for polls that no real one makes. */
typedef struct { unsigned long long types[MAX_GPUS], delivered[MAX_GPUS]; int changes; } set_t;
typedef struct { void *device; unsigned long long eventType, eventData; unsigned gpuInstanceId, computeInstanceId; } event_t;

int nvmlEventSetCreate(set_t **out) {
    const char *path = getenv("STANDIN_NVML_STATE");
    char folder[PATH_MAX];
    set_t *set = *out = calloc(1, sizeof *set);
    snprintf(folder, sizeof folder, "%s", path == NULL ? "" : path);
    char *slash = strrchr(folder, '/');
    if (slash != NULL) *slash = 0;
    set->changes = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (set->changes >= 0 && inotify_add_watch(set->changes, slash == NULL ? "." : folder, IN_MOVED_TO) < 0) {
        close(set->changes);
        set->changes = -1;
    }
    return OK;
}
int nvmlEventSetFree(set_t *set) {
    if (set->changes >= 0) close(set->changes);
    free(set);
    return OK;
}
int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *out) {
    ENTER(device);
    *out = number(gpu_of(device), "SupportedEventTypes", 0xfe0f);
    return OK;
}
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, set_t *set) {
    ENTER(device);
    set->types[gpu_of(device)] = types;
    set->delivered[gpu_of(device)] = number(gpu_of(device), "event_seq", 0);
    return OK;
}
int nvmlEventSetWait_v2(set_t *set, event_t *out, unsigned timeout_ms) {
    int failed = (int)number(-1, "error.nvmlEventSetWait_v2", OK);
    if (failed) return failed;
    unsigned seen = 0;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    for (long long now_ms, end_ms = now.tv_sec * 1000LL + now.tv_nsec / 1000000 + timeout_ms;;) {
        char drained[4096];
        while (set->changes >= 0 && read(set->changes, drained, sizeof drained) > 0) {}
        number(-1, "count", 1); /* polls at the file */
        for (int gpu = 0; gpu < MAX_GPUS && seen != generation; gpu++) {
            if (!set->types[gpu]) continue;
            if (number(gpu, "lost", 0)) return GPU_IS_LOST; /* as the library does: at once, each time */
            unsigned long long type = number(gpu, "event_type", 8);
            if (number(gpu, "event_seq", 0) <= set->delivered[gpu] || !(type & set->types[gpu])) continue;
            set->delivered[gpu]++;
            *out = (event_t){(void *)(intptr_t)(gpu + 1), type, number(gpu, "event_data", 0),
                             (unsigned)number(gpu, "event_gpu_instance", ~0u),
                             (unsigned)number(gpu, "event_compute_instance", ~0u)};
            return OK;
        }
        seen = generation;
        clock_gettime(CLOCK_MONOTONIC, &now);
        now_ms = now.tv_sec * 1000LL + now.tv_nsec / 1000000;
        if (now_ms >= end_ms) return TIMEOUT;
        struct pollfd changed = {set->changes, POLLIN, 0}; /* without inotify: polls again in a while */
        poll(&changed, 1, set->changes < 0 && end_ms - now_ms > WAIT_STEP_MS ? WAIT_STEP_MS : (int)(end_ms - now_ms));
    }
}
