// Package internal is the root of the code that two or more services need.
package internal
