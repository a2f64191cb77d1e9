package oci

import (
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"time"
)

// spdx is the part of SPDX 2.3 that a Go program needs.
type spdx struct {
	Version       string         `json:"spdxVersion"`
	DataLicense   string         `json:"dataLicense"`
	ID            string         `json:"SPDXID"`
	Name          string         `json:"name"`
	Namespace     string         `json:"documentNamespace"`
	Creation      creation       `json:"creationInfo"`
	Packages      []spdxPackage  `json:"packages"`
	Relationships []relationship `json:"relationships"`
}

type creation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

type spdxPackage struct {
	ID           string        `json:"SPDXID"`
	Name         string        `json:"name"`
	Version      string        `json:"versionInfo,omitempty"`
	Location     string        `json:"downloadLocation"`
	Analyzed     bool          `json:"filesAnalyzed"`
	Concluded    string        `json:"licenseConcluded"`
	Declared     string        `json:"licenseDeclared"`
	Copyright    string        `json:"copyrightText"`
	ExternalRefs []externalRef `json:"externalRefs,omitempty"`
	Checksums    []checksum    `json:"checksums,omitempty"`
}

type externalRef struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type checksum struct {
	Algorithm string `json:"algorithm"`
	Value     string `json:"checksumValue"`
}

type relationship struct {
	From string `json:"spdxElementId"`
	Type string `json:"relationshipType"`
	To   string `json:"relatedSpdxElement"`
}

// SBOM lists in SPDX 2.3 what the Go program at path was built of: the modules with
// their versions and checksums, as `go version -m` tells them, and Go itself. digest is
// the SHA-256 of the program in hex, which makes the document's name unique.
func SBOM(path, name, version, digest string, created time.Time) ([]byte, error) {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read what %s was built of: %w", name, err)
	}
	none := "NOASSERTION"
	doc := spdx{
		Version: "SPDX-2.3", DataLicense: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: name,
		Namespace: "https://kinference.dev/sbom/" + url.PathEscape(name) + "/" + digest,
		Creation:  creation{Created: created.UTC().Format(time.RFC3339), Creators: []string{"Tool: kinference-images"}},
	}
	add := func(p spdxPackage) {
		p.Location, p.Concluded, p.Copyright = none, none, none
		if p.Declared == "" {
			p.Declared = none
		}
		doc.Packages = append(doc.Packages, p)
	}
	const program = "SPDXRef-program"
	add(spdxPackage{ID: program, Name: name, Version: version, Declared: "Apache-2.0", Checksums: []checksum{{"SHA256", digest}}})
	doc.Relationships = append(doc.Relationships, relationship{doc.ID, "DESCRIBES", program})
	contains := func(p spdxPackage) {
		add(p)
		doc.Relationships = append(doc.Relationships, relationship{program, "CONTAINS", p.ID})
	}
	purl := func(module, version string) []externalRef {
		return []externalRef{{"PACKAGE-MANAGER", "purl", "pkg:golang/" + module + "@" + url.QueryEscape(version)}}
	}
	goVersion := strings.TrimPrefix(info.GoVersion, "go")
	contains(spdxPackage{ID: "SPDXRef-go", Name: "stdlib", Version: goVersion, Declared: "BSD-3-Clause", ExternalRefs: purl("stdlib", goVersion)})
	for i, m := range info.Deps {
		if m.Replace != nil && m.Replace.Version == "" {
			continue // another module of this repository
		}
		if m.Replace != nil {
			m = m.Replace
		}
		p := spdxPackage{ID: fmt.Sprintf("SPDXRef-module-%d", i), Name: m.Path, Version: m.Version, ExternalRefs: purl(m.Path, m.Version)}
		// h1: is a SHA-256 of the list of the module's files.
		if sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:")); err == nil && len(sum) == 32 {
			p.Checksums = []checksum{{"SHA256", hex.EncodeToString(sum)}}
		}
		contains(p)
	}
	return json.MarshalIndent(doc, "", " ")
}
