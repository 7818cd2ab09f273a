// SPDX-License-Identifier: Apache-2.0
#include "kvtransfer/ucx_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <cstring>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "services/base/fault.h"

namespace isthmus::transfer {

absl::StatusOr<SocketAddress> ParseSocketAddress(absl::string_view text) {
  const size_t colon = text.rfind(':');
  uint32_t port = 0;
  if (colon == absl::string_view::npos || !absl::SimpleAtoi(text.substr(colon + 1), &port) ||
      port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is not address:port"));
  }
  absl::string_view host = text.substr(0, colon);
  const bool is_v6 = absl::ConsumePrefix(&host, "[") && absl::ConsumeSuffix(&host, "]");
  SocketAddress address;
  int parsed = 0;
  if (is_v6) {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
    parsed = inet_pton(AF_INET6, std::string(host).c_str(), &v6->sin6_addr);
    address.length = sizeof(sockaddr_in6);
  } else {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
    parsed = inet_pton(AF_INET, std::string(host).c_str(), &v4->sin_addr);
    address.length = sizeof(sockaddr_in);
  }
  if (parsed == 1) return address;
  return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is not address:port"));
}

std::string FormatSocketAddress(const sockaddr_storage& storage) {
  char host[INET6_ADDRSTRLEN] = {};
  if (storage.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(storage);
    inet_ntop(AF_INET6, &v6.sin6_addr, host, sizeof(host));
    return absl::StrCat("[", host, "]:", ntohs(v6.sin6_port));
  }
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(storage);
  inet_ntop(AF_INET, &v4.sin_addr, host, sizeof(host));
  return absl::StrCat(host, ":", ntohs(v4.sin_port));
}

absl::StatusOr<SocketAddress> AddressOfDevice(absl::string_view devices) {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) found = nullptr;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(found, freeifaddrs);
  for (const absl::string_view device : absl::StrSplit(devices, ',', absl::SkipEmpty())) {
    for (const int family : {AF_INET, AF_INET6}) {
      for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next) {
        if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != family) continue;
        if (device != one->ifa_name) continue;
        SocketAddress address;
        address.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
        std::memcpy(&address.storage, one->ifa_addr, address.length);
        return address;  // Its port is 0.
      }
    }
  }
  return WithFaultScope(absl::UnavailableError(absl::StrCat("transfer.devices: none of \"", devices,
                                                            "\" has an address")),
                        FaultScope::kProcess);
}

}  // namespace isthmus::transfer
