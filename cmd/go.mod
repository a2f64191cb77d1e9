module github.com/kinference/kinference/cmd

go 1.26.0

require (
	github.com/kinference/kinference/api v0.0.0
	github.com/kinference/kinference/internal v0.0.0
	github.com/kinference/kinference/proto v0.0.0
	github.com/kinference/kinference/services/accounting v0.0.0
	github.com/kinference/kinference/services/classifier v0.0.0
	github.com/kinference/kinference/services/ingress v0.0.0
	github.com/kinference/kinference/services/kvtracker v0.0.0
	github.com/kinference/kinference/services/limiter v0.0.0
	github.com/kinference/kinference/services/router v0.0.0
)

replace github.com/kinference/kinference/proto => ../proto

replace github.com/kinference/kinference/api => ../api

replace github.com/kinference/kinference/internal => ../internal

replace github.com/kinference/kinference/services/ingress => ../services/ingress

replace github.com/kinference/kinference/services/router => ../services/router

replace github.com/kinference/kinference/services/kvtracker => ../services/kvtracker

replace github.com/kinference/kinference/services/limiter => ../services/limiter

replace github.com/kinference/kinference/services/classifier => ../services/classifier

replace github.com/kinference/kinference/services/accounting => ../services/accounting
