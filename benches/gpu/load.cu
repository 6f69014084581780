// One process of a benchmark, as load.py with other works: load WORK SECONDS DIRECTORY
//   fma    one thread computes fused multiply-adds, as a program does that leaves nearly all of the GPU idle
//   wide   a kernel that fills every SM several times
//   small  a short kernel each 10 ms, as an interactive client launches them
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                                     \
    do {                                                                                \
        cudaError_t e_ = (call);                                                        \
        if (e_ != cudaSuccess) {                                                        \
            fprintf(stderr, "%s: %s (%d)\n", #call, cudaGetErrorString(e_), e_);        \
            exit(4);                                                                    \
        }                                                                               \
    } while (0)

__global__ void fma_rounds(float *out, int rounds) {
    float s = out[0], t = 1.0f - s;
    for (int i = 0; i < rounds; i++) {
        s = fmaf(s, t, 0.5f);
        t = fmaf(t, s, 0.25f);
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = s + t;
}

static double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    std::string work = argv[1], directory = argv[3];
    double seconds = atof(argv[2]);
    int device, sms;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    int blocks = 1, threads = 1, rounds = 1000000;
    if (work == "wide") blocks = 32 * sms, threads = 128, rounds = 100000;
    if (work == "small") blocks = 4, threads = 128, rounds = 2000;
    float *out;
    CHECK(cudaMalloc(&out, sizeof(float) * blocks * threads));
    CHECK(cudaMemset(out, 0, sizeof(float) * blocks * threads));
    auto unit = [&] {
        fma_rounds<<<blocks, threads>>>(out, rounds);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
    };
    for (int i = 0; i < 5; i++) unit();
    fclose(fopen((directory + "/ready." + std::to_string(getpid())).c_str(), "w"));
    while (access((directory + "/go").c_str(), F_OK)) usleep(1000);
    std::vector<double> times;
    double began = now();
    while (now() - began < seconds) {
        if (work == "small") std::this_thread::sleep_for(std::chrono::milliseconds(10));
        double start = now();
        unit();
        times.push_back(now() - start);
    }
    double whole = now() - began;
    std::sort(times.begin(), times.end());
    printf("{\"units\": %zu, \"seconds\": %f, \"median_ms\": %f, \"p99_ms\": %f}\n", times.size(), whole,
           1000 * times[times.size() / 2], 1000 * times[times.size() * 99 / 100]);
}
